package main

import (
	"syscall"
	"testing"
)

// The examples of the Unicode Standard, table 3-8 to 3-11, and what Python makes of them.
func TestTextOf(t *testing.T) {
	for _, example := range []struct {
		data, whole, cut string
	}{
		{"", "", ""},
		{"a\u00e9\u2603\U0001d11e", "a\u00e9\u2603\U0001d11e", "a\u00e9\u2603\U0001d11e"},
		{"\ufffd", "\ufffd", "\ufffd"},
		{"\xc0\xafA", "\ufffd\ufffdA", "\ufffd\ufffdA"},
		{"\xed\xa0\x80", "\ufffd\ufffd\ufffd", "\ufffd\ufffd\ufffd"},
		{"\xf4\x91\x92\x93\xff", "\ufffd\ufffd\ufffd\ufffd\ufffd", "\ufffd\ufffd\ufffd\ufffd\ufffd"},
		{"\xe1\x80\xe2\xf0\x91\x92\xf1\xbfA", "\ufffd\ufffd\ufffd\ufffdA", "\ufffd\ufffd\ufffd\ufffdA"},
		{"a\xe2\x98", "a\ufffd", "a"},
		{"a\xf0\x9d\x84", "a\ufffd", "a"},
		{"a\xc3", "a\ufffd", "a"},
		{"a\xff", "a\ufffd", "a\ufffd"},
		{"a\x80", "a\ufffd", "a\ufffd"},
		{"a\xe0\x80", "a\ufffd\ufffd", "a\ufffd\ufffd"},
	} {
		if got := textOf([]byte(example.data), false); got != example.whole {
			t.Errorf("textOf(%q) = %q, not %q", example.data, got, example.whole)
		}
		if got := textOf([]byte(example.data), true); got != example.cut {
			t.Errorf("textOf(%q, cut) = %q, not %q", example.data, got, example.cut)
		}
	}
}

func TestWords(t *testing.T) {
	if got := words(syscall.ENOENT); got != "No such file or directory" {
		t.Error(got)
	}
}
