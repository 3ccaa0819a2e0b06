package main

import (
	"strings"
	"syscall"
	"unicode/utf8"
)

// textOf reads UTF-8 as far as it is; what is none becomes U+FFFD, one for each longest beginning of a character, as
// in Python. When cut, a character that is not whole at the end is left out.
func textOf(data []byte, cut bool) string {
	var text strings.Builder
	text.Grow(len(data))
	for len(data) > 0 {
		if r, size := utf8.DecodeRune(data); r != utf8.RuneError || size > 1 {
			text.Write(data[:size])
			data = data[size:]
			continue
		}
		size, whole := beginning(data)
		if cut && !whole && size == len(data) {
			break
		}
		text.WriteRune(utf8.RuneError)
		data = data[size:]
	}
	return text.String()
}

// beginning measures the longest beginning of a character at the start of data, which is none itself. whole: no
// further byte could make one of it.
func beginning(data []byte) (size int, whole bool) {
	low, high, needed := byte(0x80), byte(0xBF), 0
	switch first := data[0]; {
	case first >= 0xC2 && first <= 0xDF:
		needed = 1
	case first >= 0xE0 && first <= 0xEF:
		needed = 2
		if first == 0xE0 {
			low = 0xA0
		} else if first == 0xED {
			high = 0x9F
		}
	case first >= 0xF0 && first <= 0xF4:
		needed = 3
		if first == 0xF0 {
			low = 0x90
		} else if first == 0xF4 {
			high = 0x8F
		}
	default:
		return 1, true
	}
	for size = 1; size <= needed && size < len(data); size++ {
		if data[size] < low || data[size] > high {
			return size, true
		}
		low, high = 0x80, 0xBF
	}
	return size, false
}

// words says an error of the system as the C library does.
func words(err error) string {
	text := err.Error()
	if number, ok := err.(syscall.Errno); ok {
		text = number.Error()
	}
	return strings.ToUpper(text[:1]) + text[1:]
}
