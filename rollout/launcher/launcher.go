package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// The pauses between tries to reach the worker.
const (
	firstPause   = 10 * time.Millisecond
	longestPause = 200 * time.Millisecond
)

// lockName is the file beside the socket that a launcher holds locked for as long as one of its agents may live.
const lockName = "launcher.lock"

type launcher struct {
	control   int
	children  chan os.Signal
	terminate chan os.Signal
	guardians map[int]bool
	preloaded *preloaded // nil: agents are executed
}

// message is what the worker says: data, and the descriptor of a channel or -1.
type message struct {
	data []byte
	fd   int
}

// launch is the life of the launcher; returns its exit code.
func launch(path string) int {
	l := launcher{
		children:  make(chan os.Signal, 1),
		terminate: make(chan os.Signal, 1),
		guardians: map[int]bool{},
	}
	// No signal that an agent sends does anything to it: agents have the same user.
	standFirm()
	signal.Notify(l.children, syscall.SIGCHLD)
	signal.Notify(l.terminate, syscall.SIGTERM)
	for _, err := range []error{seal(), adopt(), inheritNothing()} {
		if err != nil {
			return complain(err)
		}
	}
	if err := keepLimits(); err != nil {
		complain(fmt.Errorf("agents can change the limits of this process: no filter of system calls: %w", err))
	}
	forgetOurs()
	program, err := os.Executable()
	if err != nil {
		return complain(err)
	}
	for _, folder := range []string{filepath.Dir(path), filepath.Dir(program)} {
		if err := walled(folder); err != nil {
			return complain(err)
		}
	}
	control, err := l.connect(path)
	if err != nil {
		return complain(err)
	}
	if control < 0 {
		return exitTerminated
	}
	l.control = control
	messages := l.messages()
	first, open := <-messages
	if !open || first.fd < 0 {
		return exitWorkerGone
	}
	var plan Plan
	channel := os.NewFile(uintptr(first.fd), "plan")
	if err := readFrame(channel, &plan); err != nil {
		return exitWorkerGone
	}
	channel.Close()
	// Until here no agent can be; from here on the worker listens to nobody before this process has ended.
	if err := lock(filepath.Join(filepath.Dir(path), lockName)); err != nil {
		return complain(err)
	}
	l.prepare(&plan)
	return l.serve(messages)
}

func complain(err error) int {
	fmt.Fprintf(os.Stderr, "launcher: %v\n", err)
	return exitBroken
}

// walled refuses a folder of another user that agents could write to: in place of the lock, the socket or this program
// they could put their own.
func walled(folder string) error {
	const writable = 2
	var about syscall.Stat_t
	if err := syscall.Stat(folder, &about); err != nil {
		return nil // made by the worker, when that comes
	}
	if int(about.Uid) != os.Geteuid() && syscall.Access(folder, writable) == nil {
		return fmt.Errorf("%s can be written to from here: mount it read-only in the container `agent`", folder)
	}
	return nil
}

// connect waits for the worker to listen; -1 when told to end meanwhile.
func (l *launcher) connect(path string) (int, error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		control, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		err = syscall.Connect(control, &syscall.SockaddrUnix{Name: path})
		if err == nil {
			return control, nil
		}
		syscall.Close(control)
		if err != syscall.ENOENT && err != syscall.ECONNREFUSED && err != syscall.EINTR {
			return -1, fmt.Errorf("cannot connect to %s: %w", path, err)
		}
		select {
		case <-l.terminate:
			return -1, nil
		case <-time.After(pause):
		}
	}
}

// messages hears the worker; closed when it is gone.
func (l *launcher) messages() <-chan message {
	heard := make(chan message)
	go func() {
		defer close(heard)
		for {
			data, fd, err := receive(l.control)
			if err != nil {
				complain(err)
			}
			if err != nil || len(data) == 0 {
				return
			}
			heard <- message{data, fd}
		}
	}()
	return heard
}

// lock takes what is given back by the end of this process only.
func lock(path string) error {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err == nil {
		err = syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		return fmt.Errorf("cannot lock %s: %w", path, err)
	}
	return nil
}

// prepare makes ready what the plan asks for and says so, or why no agent will ever start.
func (l *launcher) prepare(plan *Plan) {
	var problem string
	if err := swept(plan.Scratch); err != nil {
		problem = fmt.Sprintf("scratch_root: %v; mount a writable volume there in the container `agent`", err)
	} else if plan.Program != nil {
		l.preloaded, problem = startPreloaded(plan)
	}
	switch {
	case problem != "":
		_ = sendJSON(l.control, map[string]string{"broken": problem})
	case l.preloaded == nil:
		_ = sendJSON(l.control, map[string]any{"ready": "static launcher", "notes": []string{}})
	}
}

// serve does what the worker says until that is to end, or gone. SIGTERM ends nothing any more: agents can send it too,
// and the worker is told by the kubelet itself that the pod is to end.
func (l *launcher) serve(messages <-chan message) int {
	for {
		select {
		case <-l.children:
			if !l.bury() {
				fmt.Fprintln(os.Stderr, "launcher: the interpreter that forks the agents died")
				if l.preloaded.ready {
					// Before its agents are ended with it: one of them, or the memory that they took, was the cause.
					_ = sendJSON(l.control, map[string]bool{"exposed": true})
				}
				killTree(os.Getpid(), nil)
				return exitBroken
			}
		case answer, open := <-l.preloaded.heard():
			l.preloaded.forward(answer, open, l.control)
		case said, open := <-messages:
			if !open {
				l.endAll()
				return exitWorkerGone
			}
			switch l.obey(said) {
			case "":
			case "done":
				l.endAll()
				return exitEnded
			default:
				l.endAll()
				return exitTerminated
			}
		}
	}
}

// obey does what one message says, and returns why this is the end if it says so. An agent that cannot be begun, as
// where its descriptor did not come for want of them, is one whose channel closes: the next may succeed.
func (l *launcher) obey(said message) string {
	if said.fd >= 0 {
		defer syscall.Close(said.fd)
		if err := l.begin(said); err != nil {
			complain(fmt.Errorf("cannot start a guardian: %w", err))
		}
		return ""
	}
	var what order
	if err := json.Unmarshal(said.data, &what); err != nil {
		complain(fmt.Errorf("%q came without its descriptor, or is no message of a worker: %w", said.data, err))
		return ""
	}
	if what.Ask {
		_ = sendJSON(l.control, map[string]bool{"here": true})
	}
	if what.Kill != 0 && l.preloaded != nil {
		l.preloaded.pass(said)
	} else if l.guardians[what.Kill] {
		signalTo(what.Kill, syscall.SIGKILL)
	}
	return what.End
}

// begin gives a channel to a guardian. Made for the attempt and not before it: where one rollout runs at a time no
// agent is there that could meddle with its guardian before that is sealed.
func (l *launcher) begin(said message) error {
	if l.preloaded != nil {
		l.preloaded.pass(said)
		return nil
	}
	null, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(null)
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"launcher", asGuardian}, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{uintptr(null), 1, 2, uintptr(said.fd)},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	l.guardians[pid] = true
	return nil
}

// bury collects children. One that is no guardian is what a guardian left that was killed, and maybe the last that
// led to others: nothing of that may live. false: the agents cannot be forked any more.
func (l *launcher) bury() bool {
	ended, _ := reap()
	if l.preloaded != nil {
		if _, died := ended[l.preloaded.pid]; died {
			return l.preloaded.buried(l.control)
		}
	}
	l.killOrphans(ended)
	return true
}

func (l *launcher) killOrphans(ended map[int]syscall.WaitStatus) {
	orphaned := false
	for pid, status := range ended {
		orphaned = orphaned || !l.guardians[pid] || status != 0
		delete(l.guardians, pid)
	}
	if orphaned {
		killTree(os.Getpid(), l.spared())
	}
}

// spared are the children that see to what is below them.
func (l *launcher) spared() map[int]bool {
	if l.preloaded != nil {
		return map[int]bool{l.preloaded.pid: true}
	}
	return l.guardians
}

// endAll waits for the guardians, which end with their channels, and ends what is left then.
func (l *launcher) endAll() {
	if l.preloaded != nil {
		l.preloaded.close()
	}
	giveUp := time.After(3 * unkillable)
	for {
		ended, none := reap()
		if none {
			return
		}
		l.killOrphans(ended)
		select {
		case <-l.children:
		case <-giveUp:
			killTree(os.Getpid(), nil)
			return
		}
	}
}
