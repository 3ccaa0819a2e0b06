package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// unkillable is how long a process may outlive SIGKILL before it counts as hanging in the kernel: reported, not waited
// for.
const unkillable = 10 * time.Second

type process struct {
	state   byte
	parent  int
	threads int
}

// numbersIn lists the entries of a folder that are numbers.
func numbersIn(folder string) ([]int, error) {
	file, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	names, err := file.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	numbers := make([]int, 0, len(names))
	for _, name := range names {
		if number, err := strconv.Atoi(name); err == nil {
			numbers = append(numbers, number)
		}
	}
	return numbers, nil
}

// lookUp says what a process is; false when it is gone.
func lookUp(pid int) (process, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, false
	}
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 18 {
		return process{}, false
	}
	parent, err1 := strconv.Atoi(string(fields[1]))
	threads, err2 := strconv.Atoi(string(fields[17]))
	return process{fields[0][0], parent, threads}, err1 == nil && err2 == nil
}

// livingBelow gives the descendants of root that are no zombies, with their threads; those in spare and what is below
// them are left out.
func livingBelow(root int, spare map[int]bool) map[int]int {
	pids, err := numbersIn("/proc")
	if err != nil {
		panic(err) // nothing here can be done without it
	}
	table, children := map[int]process{}, map[int][]int{}
	for _, pid := range pids {
		if found, ok := lookUp(pid); ok {
			table[pid] = found
			children[found.parent] = append(children[found.parent], pid)
		}
	}
	living := map[int]int{}
	waiting := append([]int(nil), children[root]...)
	for len(waiting) > 0 {
		pid := waiting[len(waiting)-1]
		waiting = waiting[:len(waiting)-1]
		if spare[pid] {
			continue
		}
		if table[pid].state != 'Z' {
			living[pid] = table[pid].threads
		}
		waiting = append(waiting, children[pid]...)
	}
	return living
}

// signalTo sends a signal; that the process has ended meanwhile is what was wanted.
func signalTo(pid int, number syscall.Signal) {
	if err := syscall.Kill(pid, number); err == syscall.EPERM {
		fmt.Fprintf(os.Stderr, "launcher: process %d runs as another user and cannot be ended\n", pid)
	}
}

// killTree kills everything below root but what is in spare and below that. All are stopped first: a stopped process
// forks no more, so that a fork bomb cannot outrun the killing.
func killTree(root int, spare map[int]bool) {
	stopped := map[int]bool{}
	for {
		alive := livingBelow(root, spare)
		fresh := false
		for pid := range alive {
			if !stopped[pid] {
				fresh = true
				stopped[pid] = true
				signalTo(pid, syscall.SIGSTOP)
			}
		}
		if fresh {
			continue
		}
		for pid := range alive {
			signalTo(pid, syscall.SIGKILL)
		}
		return
	}
}

// reap collects the children that have ended. none: no child is left, which in a subreaper proves that no descendant
// is.
func reap() (ended map[int]syscall.WaitStatus, none bool) {
	ended = map[int]syscall.WaitStatus{}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return ended, true
		case pid == 0:
			return ended, false
		default:
			ended[pid] = status
		}
	}
}

// tasksOfUser counts the threads that run as this user here: what RLIMIT_NPROC counts.
func tasksOfUser() int {
	total := 0
	pids, err := numbersIn("/proc")
	if err != nil {
		panic(err)
	}
	for _, pid := range pids {
		var about syscall.Stat_t
		if syscall.Stat(fmt.Sprintf("/proc/%d", pid), &about) == nil && int(about.Uid) == os.Getuid() {
			found, _ := lookUp(pid)
			total += found.threads
		}
	}
	return total
}
