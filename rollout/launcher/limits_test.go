package main

import (
	"encoding/binary"
	"testing"
)

// verdict is what the kernel makes of the filter for a system call.
func verdict(t *testing.T, filter []instruction, machine, number uint32, arguments [6]uint64) uint32 {
	data := binary.LittleEndian.AppendUint32(nil, number)
	data = binary.LittleEndian.AppendUint32(data, machine)
	data = binary.LittleEndian.AppendUint64(data, 0) // where it was made
	for _, argument := range arguments {
		data = binary.LittleEndian.AppendUint64(data, argument)
	}
	var held uint32
	for at := 0; at < len(filter); at++ {
		switch now := filter[at]; now.code {
		case load:
			held = binary.LittleEndian.Uint32(data[now.number:])
		case and:
			held &= now.number
		case jumpIfEqual:
			if held == now.number {
				at += int(now.yes)
			} else {
				at += int(now.no)
			}
		case returnThat:
			return now.number
		default:
			t.Fatalf("no such instruction: %#x", now.code)
		}
	}
	t.Fatal("a filter without an end")
	return 0
}

func TestOnlyNewLimitsOfOthersAreRefused(t *testing.T) {
	const amd64, i386, arm64, arm, riscv64 = 0xc000003e, 0x40000003, 0xc00000b7, 0x40000028, 0xc00000f3
	const new, above = 0x7ffc_0000_1000, 0x1_0000_0000
	for _, c := range []struct {
		machine, number         uint32
		process, limit, current uint64
		want                    uint32
	}{
		{amd64, 302, 1, new, 0, refuse},
		{amd64, 302, 4711, new, new, refuse},
		{amd64, 302, 1, above, 0, refuse}, // its lower half is 0
		{amd64, 302 | x32, 1, new, 0, refuse},
		{i386, 340, 1, 0x1000, 0, refuse},
		{arm64, 261, 1, new, 0, refuse},
		{arm, 369, 1, 0x1000, 0, refuse},
		{amd64, 302, 1, 0, new, allow},     // read
		{amd64, 302, 0, new, new, allow},   // one's own
		{amd64, 302, above, new, 0, allow}, // the kernel takes the lower half: one's own
		{i386, 340, 0, 0x1000, 0, allow},
		{arm64, 261, 0, new, 0, allow},
		{amd64, 340, 1, new, 0, allow}, // other calls, which have the number on another machine
		{i386, 302, 1, 0x1000, 0, allow},
		{arm64, 302, 1, new, 0, allow},
		{arm, 261, 1, 0x1000, 0, allow},
		{riscv64, 261, 1, new, 0, allow},
	} {
		arguments := [6]uint64{c.process, 7, c.limit, c.current}
		if got := verdict(t, limitsFilter(), c.machine, c.number, arguments); got != c.want {
			t.Errorf("%#x, call %d of %d with %#x: %#x, want %#x", c.machine, c.number, c.process, c.limit, got, c.want)
		}
	}
}
