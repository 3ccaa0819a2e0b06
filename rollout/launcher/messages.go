package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"syscall"
)

// Plan is what the worker says first, once per connection.
type Plan struct {
	Preload     []string          `json:"preload"`
	Program     []string          `json:"program"`     // what to fork from the preloaded modules; nil: agents are executed
	Interpreter []string          `json:"interpreter"` // with a program: the agent's Python and its options
	Env         map[string]string `json:"env"`         // of the interpreter, on top of the container's own
	Defaults    map[string]string `json:"defaults"`    // below the container's own
	Cwd         string            `json:"cwd"`         // of the interpreter; "": the container's
	Scratch     string            `json:"scratch"`     // folder of the agents' scratch folders
}

// AgentStart is one agent to run; texts, paths, seconds, bytes. The fields are explained in launcher.py.
type AgentStart struct {
	Argv            []string          `json:"argv"`
	Env             map[string]string `json:"env"`
	Defaults        map[string]string `json:"defaults"`
	Cwd             string            `json:"cwd"`
	Scratch         string            `json:"scratch"`
	Folders         []string          `json:"folders"`
	Files           map[string]string `json:"files"`
	Stdin           *string           `json:"stdin"`
	OutputFile      *string           `json:"output_file"`
	OutputBytes     int               `json:"output_bytes"`
	LogBytes        int               `json:"log_bytes"`
	Seconds         float64           `json:"seconds"`
	GraceSeconds    float64           `json:"grace_seconds"`
	Processes       *int              `json:"processes"`
	ProcessHeadroom *int              `json:"process_headroom"`
	Rlimits         map[string]uint64 `json:"rlimits"`
}

// AgentEnd says that no process of the agent is left and that its folder is gone.
type AgentEnd struct {
	Event           string  `json:"event"`
	Ended           string  `json:"ended"`
	ExitCode        *int    `json:"exit_code"`
	Signal          *int    `json:"signal"`
	Message         *string `json:"message"`
	Output          string  `json:"output"`
	OutputTruncated bool    `json:"output_truncated"`
	LogTail         string  `json:"log_tail"`
	LogBytes        int64   `json:"log_bytes"`
	Seconds         float64 `json:"seconds"`
}

// launching says that the guardian is within reach of the agent from now on: whatever ends it is the agent's doing.
type launching struct {
	Event    string `json:"event"`
	Guardian int    `json:"guardian"`
}

// started says that the program of the agent runs.
type started struct {
	Event     string  `json:"event"`
	Monotonic float64 `json:"monotonic"`
}

// command is what the worker says on a channel after the AgentStart.
type command struct {
	Do string `json:"do"`
}

// order is what the worker says on the control socket besides "start".
type order struct {
	Kill int    `json:"kill"` // a guardian that does not answer
	Ask  bool   `json:"ask"`  // whether the launcher lives on
	End  string `json:"end"`  // no agent will come, and why: "done" or "stopped"
}

// maxFrame bounds what a frame may claim to hold: a broken header shall not take the memory of the container.
const maxFrame = 1 << 30

// writeFrame sends four bytes of length and JSON.
func writeFrame(channel io.Writer, message any) error {
	data, err := json.Marshal(message)
	if err != nil {
		return err
	}
	frame := binary.BigEndian.AppendUint32(make([]byte, 0, len(data)+4), uint32(len(data)))
	_, err = channel.Write(append(frame, data...))
	return err
}

// readFrame reads the next message; any error means that the other side is gone.
func readFrame(channel io.Reader, message any) error {
	var header [4]byte
	if _, err := io.ReadFull(channel, header[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(header[:])
	if size > maxFrame {
		return errors.New("a message that is too long")
	}
	data := make([]byte, size)
	if _, err := io.ReadFull(channel, data); err != nil {
		return err
	}
	return json.Unmarshal(data, message)
}

// longest is what a message of the control socket can be: more does not fit into the kernel's buffer.
const longest = 1 << 18

// receive gets a message of the control socket and the descriptor that comes with it, or -1; no data: the other side
// is gone.
func receive(control int) ([]byte, int, error) {
	data, rights := make([]byte, longest), make([]byte, syscall.CmsgSpace(4))
	for {
		size, rightsSize, _, _, err := syscall.Recvmsg(control, data, rights, syscall.MSG_CMSG_CLOEXEC)
		if err == syscall.EINTR {
			continue
		}
		if err == syscall.ECONNRESET {
			return nil, -1, nil
		}
		if err != nil {
			return nil, -1, err
		}
		passed, err := descriptor(rights[:rightsSize])
		return data[:size], passed, err
	}
}

func descriptor(rights []byte) (int, error) {
	messages, err := syscall.ParseSocketControlMessage(rights)
	if err != nil || len(messages) == 0 {
		return -1, err
	}
	passed, err := syscall.ParseUnixRights(&messages[0])
	if err != nil || len(passed) == 0 {
		return -1, err
	}
	return passed[0], nil
}

// send sends one message, with a descriptor unless that is negative.
func send(control int, data []byte, passed int) error {
	var rights []byte
	if passed >= 0 {
		rights = syscall.UnixRights(passed)
	}
	for {
		err := syscall.Sendmsg(control, data, rights, nil, syscall.MSG_NOSIGNAL)
		if err != syscall.EINTR {
			return err
		}
	}
}

// sendJSON sends one message without a descriptor. An error means that the other side is gone, which reading shows too.
func sendJSON(control int, message any) error {
	data, err := json.Marshal(message)
	if err != nil {
		return err
	}
	return send(control, data, -1)
}
