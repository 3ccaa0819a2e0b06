package main

import (
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

const (
	prSetDumpable       = 4
	prSetChildSubreaper = 36
	clockMonotonic      = 1
	signals             = 64
)

func prctl(option int, value uintptr) error {
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, uintptr(option), value, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// seal keeps other processes of the same user from this one's memory and descriptors.
func seal() error {
	return prctl(prSetDumpable, 0)
}

// adopt makes this process the parent of every orphan below it, as the first process of a container is anyway.
func adopt() error {
	return prctl(prSetChildSubreaper, 1)
}

// monotonic is the time in seconds by the clock that all processes of the machine share.
func monotonic() (float64, error) {
	var now syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&now)), 0)
	if errno != 0 {
		return 0, errno
	}
	return float64(now.Sec) + float64(now.Nsec)/1e9, nil
}

// standFirm leaves no signal that ends this process, but those that no process can refuse.
//
// The runtime has no handler for some that thread libraries use (32, 34). A first process of a container is not ended by
// a default action, unless its first thread holds signals back just then, as it does while it forks: Linux then looks at
// the other threads, and ends all of them.
func standFirm() {
	signal.Notify(make(chan os.Signal, 1))
	ignore := [32]byte{1} // struct sigaction of the kernel: the handler is SIG_IGN
	for number := uintptr(1); number <= signals; number++ {
		var now [32]byte
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, number, 0, uintptr(unsafe.Pointer(&now)), 8, 0, 0)
		if [8]byte(now[:8]) == ([8]byte{}) {
			syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, number, uintptr(unsafe.Pointer(&ignore)), 0, 8, 0, 0)
		}
	}
}

// defaultSignals lets every signal do what it does in a new process, ignored ones included.
func defaultSignals() {
	var action [32]byte // struct sigaction of the kernel: handler, flags, restorer, mask; all zero is SIG_DFL
	for number := uintptr(1); number <= signals; number++ {
		if number != uintptr(syscall.SIGKILL) && number != uintptr(syscall.SIGSTOP) {
			syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, number, uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
		}
	}
	var none uint64
	const setMask = 2
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
}

// inheritNothing sees to it that no program started from here gets a descriptor that it was not given.
func inheritNothing() error {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
	return nil
}

// pipe makes a pipe whose reading end knows deadlines; the writing end blocks, as programs expect of their output.
func pipe() (*os.File, int, error) {
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	if err := syscall.SetNonblock(ends[0], true); err != nil {
		return nil, -1, err
	}
	return os.NewFile(uintptr(ends[0]), "pipe"), ends[1], nil
}

func seconds(number float64) time.Duration {
	return time.Duration(min(number, 1e9) * float64(time.Second))
}
