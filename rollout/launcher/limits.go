package main

import (
	"runtime"
	"syscall"
	"unsafe"
)

// Of linux/prctl.h, linux/seccomp.h and linux/filter.h.
const (
	prGetNoNewPrivs = 39

	setModeFilter = 1
	onAllThreads  = 1 << 0
	noSlowdown    = 1 << 2 // as a filter else brings: processors are kept from speculating
	allow         = 0x7fff0000
	refuse        = 0x00050000 | uint32(syscall.EPERM)

	load          = 0x20
	and           = 0x54
	jumpIfEqual   = 0x15
	returnThat    = 0x06
	atNumber      = 0 // in struct seccomp_data
	atMachine     = 4
	atProcess     = 16 // the first argument of a call
	atNewLimit    = 32 // the third, a pointer; its upper half:
	atNewLimitTop = 36
)

// prlimits are the numbers of prlimit64 by machine (linux/audit.h): a program may make the calls of another than ours.
var prlimits = [][2]uint32{
	{0xc000003e, 302}, // x86-64, and with x32 in the number its variant
	{0x40000003, 340}, // x86
	{0xc00000b7, 261}, // arm64
	{0x40000028, 369}, // arm
}

const x32 = 0x40000000

var seccomp = map[string]uintptr{"amd64": 317, "arm64": 277}

// instruction is struct sock_filter: of two jumps, how many instructions are passed over.
type instruction struct {
	code    uint16
	yes, no uint8
	number  uint32
}

// limitsFilter refuses new limits for a process that is named; one's own has the name 0.
func limitsFilter() []instruction {
	var filter []instruction
	for i, call := range prlimits {
		left := uint8(5 * (len(prlimits) - 1 - i))
		filter = append(filter,
			instruction{code: load, number: atMachine},
			instruction{code: jumpIfEqual, number: call[0], no: 3},
			instruction{code: load, number: atNumber},
			instruction{code: and, number: ^uint32(x32)},
			instruction{code: jumpIfEqual, number: call[1], yes: left + 1, no: left},
		)
	}
	return append(filter,
		instruction{code: returnThat, number: allow},
		instruction{code: load, number: atProcess},
		instruction{code: jumpIfEqual, number: 0, yes: 4},
		instruction{code: load, number: atNewLimit},
		instruction{code: jumpIfEqual, number: 0, no: 3},
		instruction{code: load, number: atNewLimitTop},
		instruction{code: jumpIfEqual, number: 0, no: 1},
		instruction{code: returnThat, number: allow},
		instruction{code: returnThat, number: refuse},
	)
}

// keepLimits sees to it that no process below this one sets limits of another: agents have the user of launcher and
// guardians, and could take descriptors, memory or time of the processor from them. Only where no program gains
// privileges by its start, as in a container that says nothing of it: elsewhere the kernel allows no filter.
func keepLimits() error {
	gained, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, prGetNoNewPrivs, 0, 0, 0, 0, 0)
	if errno != 0 || gained == 0 {
		return nil
	}
	filter := limitsFilter()
	program := struct {
		length uint16
		first  *instruction
	}{uint16(len(filter)), &filter[0]}
	for _, flags := range []uintptr{onAllThreads | noSlowdown, onAllThreads} { // gVisor does not know the other
		_, _, errno = syscall.RawSyscall(seccomp[runtime.GOARCH], setModeFilter, flags, uintptr(unsafe.Pointer(&program)))
		if errno != syscall.EINVAL {
			break
		}
	}
	if errno != 0 {
		return errno
	}
	return nil
}
