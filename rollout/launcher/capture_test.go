package main

import (
	"bytes"
	"math/rand"
	"testing"
)

func TestCapture(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for range 500 {
		c := capture{outputBytes: random.Intn(60), logBytes: random.Intn(60)}
		var output, all []byte
		for range random.Intn(12) {
			data := make([]byte, random.Intn(50))
			random.Read(data)
			isOutput := random.Intn(2) == 0
			c.take(data, isOutput)
			all = append(all, data...)
			if isOutput {
				output = append(output, data...)
			}
			if len(c.tail) > 2*c.logBytes+50 {
				t.Fatalf("%d bytes kept of a log of %d", len(c.tail), c.logBytes)
			}
		}
		if head := output[:min(len(output), c.outputBytes)]; !bytes.Equal(c.head, head) {
			t.Fatalf("output %x, not %x", c.head, head)
		}
		if tail := all[max(0, len(all)-c.logBytes):]; !bytes.Equal(c.log(), tail) {
			t.Fatalf("log %x, not %x", c.log(), tail)
		}
		if c.cut != (len(output) > c.outputBytes) || c.total != int64(len(all)) {
			t.Fatalf("cut %v, total %d", c.cut, c.total)
		}
	}
}
