package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const sample = time.Second

// How an attempt ended; docs and queue know these words.
const (
	exited       = "exited"
	signalled    = "signalled"
	deadline     = "deadline"
	cancelled    = "cancelled"
	startFailed  = "startFailed"
	executorLost = "executorLost"
)

// What a guardian may have to do at a time.
const (
	toTerminate = "term"
	toKill      = "kill"
	toGiveUp    = "lost"
	toCount     = "count"
)

// channelFD is where a guardian finds its channel.
const channelFD = 3

type guardian struct {
	channel  *os.File
	children chan os.Signal
	start    AgentStart
	capture  capture
	streams  []*os.File
	begun    time.Time
	pid      int
	status   *syscall.WaitStatus
	ending   string
	message  string
	due      map[string]time.Time
}

// guard is the life of a guardian: it runs one agent and says how it ended when nothing is left of it.
func guard() int {
	g := guardian{begun: time.Now(), children: make(chan os.Signal, 1), due: map[string]time.Time{}}
	standFirm() // it ends with the worker and not before its agent
	signal.Notify(g.children, syscall.SIGCHLD)
	for _, err := range []error{seal(), adopt(), inheritNothing(), syscall.SetNonblock(channelFD, true)} {
		if err != nil {
			fmt.Fprintf(os.Stderr, "launcher: guardian: %v\n", err)
			return exitBroken
		}
	}
	g.channel = os.NewFile(channelFD, "channel")
	if err := readFrame(g.channel, &g.start); err != nil {
		if err != io.EOF {
			fmt.Fprintf(os.Stderr, "launcher: guardian: %v\n", err)
		}
		return exitEnded
	}
	g.report(g.run())
	return exitEnded
}

func (g *guardian) run() AgentEnd {
	start := &g.start
	g.capture = capture{outputBytes: start.OutputBytes, logBytes: start.LogBytes}
	if start.Processes != nil && start.ProcessHeadroom != nil {
		start.Rlimits["NPROC"] = uint64(tasksOfUser() + *start.ProcessHeadroom)
	}
	stdin, err := makeScratch(start)
	if err != nil {
		return g.broken(executorLost, err.Error())
	}
	agent, problem := g.execution()
	if problem != "" {
		return g.broken(startFailed, problem)
	}
	failure, err := g.launch(stdin, agent)
	if err != nil {
		return g.broken(executorLost, err.Error())
	}
	return g.watch(failure)
}

func (g *guardian) broken(ending, message string) AgentEnd {
	g.ending, g.message = ending, message
	return g.end(0)
}

// execution says what is to be executed, or why that cannot be.
func (g *guardian) execution() (agent execution, problem string) {
	environment := merged(g.start.Defaults, g.start.Env)
	agent = execution{Path: pathOf(environment), Cwd: g.start.Cwd, Rlimits: g.start.Rlimits}
	for _, word := range g.start.Argv {
		agent.Argv = append(agent.Argv, []byte(word))
	}
	for _, variable := range variables(environment) {
		agent.Env = append(agent.Env, []byte(variable))
	}
	for _, words := range [][][]byte{agent.Argv, agent.Env} {
		for _, word := range words {
			if strings.IndexByte(string(word), 0) >= 0 {
				return agent, "the task or the environment cannot be handed over (embedded null byte); " +
					"use agentProtocol.task.from: file or stdin"
			}
		}
	}
	return agent, ""
}

// launch starts the process that becomes the agent. What is said on the result is why it could not; nothing: it did.
func (g *guardian) launch(stdin int, agent execution) (<-chan string, error) {
	message, err := json.Marshal(agent)
	if err != nil {
		return nil, err
	}
	var theirs [4]int
	var ours [4]*os.File
	for i := range 3 { // output, errors, failure
		if ours[i], theirs[i], err = pipe(); err != nil {
			return nil, err
		}
	}
	var source [2]int
	if err := syscall.Pipe2(source[:], syscall.O_CLOEXEC); err != nil {
		return nil, err
	}
	g.pid, err = syscall.ForkExec("/proc/self/exe", []string{"launcher", asAgent}, &syscall.ProcAttr{
		Env:   []string{},
		Files: []uintptr{uintptr(stdin), uintptr(theirs[0]), uintptr(theirs[1]), uintptr(theirs[2]), uintptr(source[0])},
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	for _, fd := range []int{stdin, theirs[0], theirs[1], theirs[2], source[0]} {
		syscall.Close(fd)
	}
	writing := os.NewFile(uintptr(source[1]), "execution")
	if err != nil {
		writing.Close()
		return nil, err
	}
	g.report(launching{"launching", os.Getpid()}) // it is still ours: it waits for what to execute
	go func() {
		writing.Write(message) // fails when the process was ended meanwhile, which its end shows
		writing.Close()
	}()
	g.streams = ours[:2]
	g.capture.follow(ours[0], g.start.OutputFile == nil)
	g.capture.follow(ours[1], false)
	failure := make(chan string, 1)
	go func() {
		problem, _ := io.ReadAll(ours[2])
		ours[2].Close()
		failure <- textOf(problem, false)
	}()
	return failure, nil
}

// commands hears the worker; closed when it is gone.
func (g *guardian) commands() <-chan string {
	heard := make(chan string)
	go func() {
		defer close(heard)
		for {
			var said command
			if readFrame(g.channel, &said) != nil {
				return
			}
			heard <- said.Do
		}
	}()
	return heard
}

// watch waits for the end of the agent, by itself or by us; returns when none of its processes is left.
func (g *guardian) watch(failure <-chan string) AgentEnd {
	commands := g.commands()
	g.due[toTerminate] = g.begun.Add(seconds(g.start.Seconds))
	if g.start.Processes != nil {
		g.due[toCount] = g.begun
	}
	for g.status == nil && g.ending != executorLost {
		timer := time.NewTimer(g.next())
		select {
		case <-g.children:
			g.reap()
		case problem := <-failure:
			g.started(problem)
			failure = nil
		case said, open := <-commands:
			if !open {
				commands = nil
			}
			if g.ending == "" {
				g.ending = cancelled
			}
			if !open || said == "kill" {
				g.due[toKill] = time.Now()
			} else {
				g.due[toTerminate] = time.Now()
			}
		case <-timer.C:
		}
		timer.Stop()
		for what, at := range g.due {
			if !at.After(time.Now()) {
				delete(g.due, what)
				g.act(what)
			}
		}
	}
	elapsed := time.Since(g.begun).Seconds()
	if failure != nil && g.ending != executorLost {
		g.started(<-failure)
	}
	g.endDescendants()
	if g.ending == executorLost {
		for _, stream := range g.streams {
			stream.SetReadDeadline(time.Now())
		}
	}
	g.capture.wait()
	return g.end(elapsed)
}

func (g *guardian) next() time.Duration {
	wait := time.Hour
	for _, at := range g.due {
		wait = min(wait, time.Until(at))
	}
	return max(0, wait)
}

func (g *guardian) act(what string) {
	now := time.Now()
	switch what {
	case toTerminate:
		if g.ending == "" {
			g.ending = deadline
		}
		g.signalAgent(syscall.SIGTERM)
		g.due[toKill] = now.Add(seconds(g.start.GraceSeconds))
	case toKill:
		g.signalAgent(syscall.SIGKILL)
		g.due[toGiveUp] = now.Add(unkillable)
	case toGiveUp:
		g.lost()
	case toCount:
		count := 0
		for _, threads := range livingBelow(os.Getpid(), nil) {
			count += threads
		}
		if count > *g.start.Processes {
			g.message = fmt.Sprintf("ended: the agent ran %d processes and threads, limits.processes allows %d",
				count, *g.start.Processes)
			killTree(os.Getpid(), nil)
		}
		g.due[toCount] = now.Add(sample)
	}
}

func (g *guardian) started(problem string) {
	if problem != "" {
		g.ending, g.message = startFailed, problem
		return
	}
	now, err := monotonic()
	if err != nil {
		panic(err)
	}
	g.report(started{"started", now})
}

// report says something to the worker. When it is gone, reading from the channel shows that.
func (g *guardian) report(message any) {
	_ = writeFrame(g.channel, message)
}

func (g *guardian) reap() (none bool) {
	ended, none := reap()
	if status, found := ended[g.pid]; found {
		g.status = &status
	}
	return none
}

// signalAgent reaches the process group of the agent, which is made before its process has begun.
func (g *guardian) signalAgent(number syscall.Signal) {
	signalTo(-g.pid, number)
}

func (g *guardian) lost() {
	g.ending, g.message = executorLost, "a process of the agent outlived SIGKILL: it hangs in the kernel"
}

// endDescendants kills what the agent left, until nothing is.
func (g *guardian) endDescendants() {
	giveUp := time.Now().Add(unkillable)
	pause := 500 * time.Microsecond
	for !g.reap() && g.ending != executorLost {
		killTree(os.Getpid(), nil)
		time.Sleep(pause)
		pause = min(2*pause, 50*time.Millisecond)
		if time.Now().After(giveUp) {
			g.lost()
		}
	}
}

func (g *guardian) end(elapsed float64) AgentEnd {
	output, cut := g.capture.head, g.capture.cut
	if g.start.OutputFile != nil {
		output, cut = readBounded(*g.start.OutputFile, g.start.OutputBytes)
	}
	if err := removeTree(g.start.Scratch); err != nil {
		fmt.Fprintf(os.Stderr, "launcher: cannot remove %s: %v\n", g.start.Scratch, err)
	}
	result := AgentEnd{
		Event:           "ended",
		Ended:           g.ending,
		Output:          textOf(output, cut),
		OutputTruncated: cut,
		LogTail:         textOf(g.capture.log(), false),
		LogBytes:        g.capture.total,
		Seconds:         elapsed,
	}
	if g.message != "" {
		result.Message = &g.message
	}
	if g.status != nil && g.status.Exited() {
		if result.Ended == "" {
			result.Ended = exited
		}
		if code := g.status.ExitStatus(); result.Ended != startFailed {
			result.ExitCode = &code
		}
	}
	if g.status != nil && g.status.Signaled() {
		if result.Ended == "" {
			result.Ended = signalled
		}
		number := int(g.status.Signal())
		result.Signal = &number
	}
	return result
}
