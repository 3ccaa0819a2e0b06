package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// execution is what the guardian hands to the process that becomes the agent. Bytes, since an environment is no text.
type execution struct {
	Argv    [][]byte
	Env     [][]byte
	Path    string // PATH of that environment
	Cwd     string
	Rlimits map[string]uint64
}

// Descriptors of the process that becomes the agent.
const (
	failureFD   = 3 // where it says why it could not; closed by the agent's start
	executionFD = 4
)

var resources = map[string]int{"CPU": 0, "FSIZE": 1, "DATA": 2, "CORE": 4, "NPROC": 6}

// becomeAgent is the last of ours in the process of an agent: what cannot be done from its parent.
func becomeAgent() int {
	syscall.CloseOnExec(failureFD)
	syscall.CloseOnExec(executionFD)
	failure := os.NewFile(failureFD, "failure")
	fmt.Fprint(failure, execute(os.NewFile(executionFD, "execution")))
	return 127
}

// execute returns only when the agent cannot be started, with the words that say why.
func execute(source io.ReadCloser) string {
	data, err := io.ReadAll(source)
	if err != nil {
		return "the agent could not be started: " + words(err)
	}
	var agent execution
	if err := json.Unmarshal(data, &agent); err != nil {
		return "the agent could not be started: " + err.Error()
	}
	argv, env := texts(agent.Argv), texts(agent.Env)
	if err := goFirst(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "the agent could not be started: " + err.Error()
	}
	if agent.Cwd != "" {
		if err := syscall.Chdir(agent.Cwd); err != nil {
			return fmt.Sprintf("working folder %s: %s", agent.Cwd, words(err))
		}
	}
	for name, value := range agent.Rlimits {
		if err := limit(name, value); err != nil {
			return fmt.Sprintf("the agent could not be started: limit %s: %s", name, words(err))
		}
	}
	defaultSignals()
	err = firstThatGoes(candidates(argv[0], agent.Path), func(file string) error {
		return syscall.Exec(file, argv, env)
	})
	return startFailure(err, argv[0], agent.Path)
}

// goFirst sees to it that the agent goes before the parts that watch it when memory runs out. Raised from what the
// container has: most pods have nearly the highest, and to lower it is refused.
func goFirst() error {
	const path, most, more = "/proc/self/oom_score_adj", 1000, 500
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	found, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(strconv.Itoa(min(most, found+more))), 0)
}

func texts(words [][]byte) []string {
	result := make([]string, len(words))
	for i, word := range words {
		result[i] = string(word)
	}
	return result
}

// limit sets soft and hard limit, as far as the hard one allows.
func limit(name string, value uint64) error {
	kind, known := resources[name]
	if !known {
		return errors.New("unknown")
	}
	var bound syscall.Rlimit
	if err := syscall.Getrlimit(kind, &bound); err != nil {
		return err
	}
	value = min(value, bound.Max)
	return syscall.Setrlimit(kind, &syscall.Rlimit{Cur: value, Max: value})
}

// candidates are the files that a command may mean.
func candidates(command, path string) []string {
	if strings.Contains(command, "/") {
		return []string{command}
	}
	var files []string
	for _, folder := range strings.Split(path, ":") {
		if folder != "" && !strings.HasSuffix(folder, "/") {
			folder += "/"
		}
		files = append(files, folder+command)
	}
	return files
}

// firstThatGoes tries to start one file after the other. When none can be started, the error that says most.
func firstThatGoes(files []string, start func(file string) error) error {
	var last, telling error
	for _, file := range files {
		if last = start(file); last == nil {
			return nil
		}
		if last != syscall.ENOENT && last != syscall.ENOTDIR && telling == nil {
			telling = last
		}
	}
	if telling != nil {
		return telling
	}
	return last
}

// startFailure is what a user can read about an agent that could not be started.
func startFailure(err error, command, path string) string {
	switch err {
	case syscall.ENOENT:
		if !strings.Contains(command, "/") {
			return fmt.Sprintf("command %s: not found in PATH=%s; correct `command` of the container `agent`, "+
				"or install it", command, path)
		}
		if _, err := os.Stat(command); err == nil {
			return fmt.Sprintf("command %s: the interpreter named in its first line does not exist; correct that line",
				command)
		}
		return fmt.Sprintf("command %s: does not exist; correct `command` of the container `agent`, or install it",
			command)
	case syscall.EACCES, syscall.EPERM:
		return fmt.Sprintf("command %s: not executable (%s); chmod +x, or name its interpreter in `command`",
			command, words(err))
	case syscall.ENOEXEC:
		return fmt.Sprintf("command %s: neither a program nor a script with an interpreter in its first line (#!)",
			command)
	case syscall.E2BIG:
		return "the task is too long for an argument or a variable (128 KiB); use agentProtocol.task.from: file or stdin"
	}
	return fmt.Sprintf("command %s: %s", command, words(err))
}
