package main

import (
	"os"
	"syscall"
	"unsafe"
)

// outsidersOnly is a signal handler that drops what a process of this container has sent, and passes on to the runtime's
// what comes from outside: of such a sender a process of another namespace gets no id (0), and that a signal was sent by
// kill (code 0) the kernel lets nobody claim. In assembly, since the runtime says of a signal only that it came, and
// cannot be kept from taking SIGTERM before others look at it.
func outsidersOnly()

// outsidersOnlyAddress is where the kernel finds outsidersOnly: to Go its name is that of another function, which calls it.
func outsidersOnlyAddress() uintptr

// obeying is the runtime's handler.
var obeying uintptr

// obeyOutsidersOnly makes a signal that is asked for already (signal.Notify) heard only where it comes from outside of
// the container. Where this is no first process, as in tests, everybody is inside.
func obeyOutsidersOnly(number syscall.Signal) error {
	if os.Getpid() != 1 {
		return nil
	}
	var action [32]byte // struct sigaction of the kernel: the handler comes first
	if err := sigaction(number, nil, &action); err != nil {
		return err
	}
	handler := (*uintptr)(unsafe.Pointer(&action))
	obeying, *handler = *handler, outsidersOnlyAddress()
	return sigaction(number, &action, nil)
}

func sigaction(number syscall.Signal, next, last *[32]byte) error {
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(number), uintptr(unsafe.Pointer(next)),
		uintptr(unsafe.Pointer(last)), 8, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
