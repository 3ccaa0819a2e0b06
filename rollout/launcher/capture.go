package main

import (
	"os"
	"sync"
)

const chunk = 65536

// capture is what comes out of an agent: counted, its head kept as output, its tail as log, the rest forgotten.
type capture struct {
	mutex       sync.Mutex
	readers     sync.WaitGroup
	outputBytes int
	logBytes    int
	head        []byte
	tail        []byte
	total       int64
	cut         bool
}

func (c *capture) take(data []byte, isOutput bool) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.total += int64(len(data))
	if isOutput {
		room := c.outputBytes - len(c.head)
		c.head = append(c.head, data[:min(room, len(data))]...)
		c.cut = c.cut || len(data) > room
	}
	c.tail = append(c.tail, data...)
	if extra := len(c.tail) - c.logBytes; extra > c.logBytes {
		c.tail = c.tail[:copy(c.tail, c.tail[extra:])]
	}
}

// log is the tail; only after wait.
func (c *capture) log() []byte {
	return c.tail[max(0, len(c.tail)-c.logBytes):]
}

// follow reads a stream to its end.
func (c *capture) follow(stream *os.File, isOutput bool) {
	c.readers.Add(1)
	go func() {
		defer c.readers.Done()
		data := make([]byte, chunk)
		for {
			size, err := stream.Read(data)
			c.take(data[:size], isOutput)
			if err != nil {
				return
			}
		}
	}()
}

// wait returns when nobody reads any more: all streams have ended, or their deadline is over.
func (c *capture) wait() {
	c.readers.Wait()
}
