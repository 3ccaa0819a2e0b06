package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// pythonLauncher lies beside this program.
const pythonLauncher = "launcher.py"

// preloaded is launcher.py in the agent's own interpreter, which forks the agents from the modules it has imported. It
// gets what the worker says passed on, and the worker what it answers.
type preloaded struct {
	pid     int
	control int
	answers chan []byte
	failed  bool // it has said why no agent can be forked
	ready   bool // it has said that agents can
}

// startPreloaded starts the interpreter of a plan, or says why that cannot be.
func startPreloaded(plan *Plan) (*preloaded, string) {
	environment := merged(plan.Defaults, plan.Env)
	path := pathOf(environment)
	command := plan.Interpreter[0]
	if plan.Cwd != "" {
		if about, err := os.Stat(plan.Cwd); err != nil {
			return nil, fmt.Sprintf("working folder %s: %s", plan.Cwd, words(unwrapped(err)))
		} else if !about.IsDir() {
			return nil, fmt.Sprintf("working folder %s: %s", plan.Cwd, words(syscall.ENOTDIR))
		}
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err.Error()
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err.Error()
	}
	defer syscall.Close(pair[1])
	argv := append(append([]string{}, plan.Interpreter...), filepath.Join(filepath.Dir(program), pythonLauncher))
	attributes := &syscall.ProcAttr{
		Dir:   plan.Cwd,
		Env:   variables(environment),
		Files: []uintptr{uintptr(pair[1]), 2, 2}, // what modules print while they are imported belongs into the log
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	var pid int
	err = firstThatGoes(candidates(command, path), func(file string) (err error) {
		pid, err = syscall.ForkExec(file, argv, attributes)
		return err
	})
	if err != nil {
		syscall.Close(pair[0])
		return nil, fmt.Sprintf("agentProtocol.preload: %s: %s (PATH=%s); correct the first word of `command`",
			command, words(err), path)
	}
	p := &preloaded{pid: pid, control: pair[0], answers: make(chan []byte)}
	go p.hear()
	_ = sendJSON(p.control, map[string]any{"preload": plan.Preload, "program": plan.Program, "sealed": true})
	return p, ""
}

func unwrapped(err error) error {
	if inner, ok := err.(*os.PathError); ok {
		return inner.Err
	}
	return err
}

func (p *preloaded) hear() {
	defer close(p.answers)
	for {
		data, _, err := receive(p.control)
		if err != nil || len(data) == 0 {
			return
		}
		p.answers <- data
	}
}

// heard is what it says; never anything where there is none.
func (p *preloaded) heard() <-chan []byte {
	if p == nil {
		return nil
	}
	return p.answers
}

func (p *preloaded) forward(answer []byte, open bool, worker int) {
	if !open {
		p.answers = nil
		return
	}
	var said struct{ Failed, Ready *string }
	if json.Unmarshal(answer, &said) == nil {
		p.failed = p.failed || said.Failed != nil
		p.ready = p.ready || said.Ready != nil
	}
	_ = send(worker, answer, -1)
}

// pass hands over what the worker said. When it is dead, its end says so.
func (p *preloaded) pass(said message) {
	_ = send(p.control, said.data, said.fd)
}

// buried hears its last words; true when its end was to be expected after them.
func (p *preloaded) buried(worker int) bool {
	for p.answers != nil {
		answer, open := <-p.answers
		p.forward(answer, open, worker)
	}
	return p.failed
}

// close ends it with all that it has.
func (p *preloaded) close() {
	syscall.Shutdown(p.control, syscall.SHUT_RDWR)
}
