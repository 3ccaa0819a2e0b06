package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"
)

const (
	folderItself = syscall.O_DIRECTORY | syscall.O_NOFOLLOW | syscall.O_CLOEXEC
	oPath        = 0x200000
	atRemoveDir  = 0x200
	here         = -100 // AT_FDCWD
)

// ofAgents begins the names of the agents' folders in a pod (worker/main.py says them).
const ofAgents = "kitestring-"

// makeScratch makes the folder of an attempt, what belongs into it, and the standard input of its agent.
func makeScratch(start *AgentStart) (stdin int, err error) {
	if err := enterable(filepath.Dir(start.Scratch)); err != nil {
		return -1, err
	}
	if err := os.Mkdir(start.Scratch, 0o700); err != nil {
		return -1, err
	}
	for _, folder := range start.Folders {
		if err := os.Mkdir(folder, 0o700); err != nil {
			return -1, err
		}
	}
	for path, content := range start.Files {
		if err := writePrivate(path, content); err != nil {
			return -1, err
		}
	}
	if start.Stdin == nil {
		return syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	}
	// A file, not a pipe: an agent that never reads a task of many megabytes blocks nobody.
	path := filepath.Join(start.Scratch, ".stdin")
	if err := writePrivate(path, *start.Stdin); err != nil {
		return -1, err
	}
	stdin, err = syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return stdin, os.Remove(path)
}

func writePrivate(path, content string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err := file.WriteString(content); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

// readBounded gives the first bytes of a regular file and whether there are more; nothing when there is no such file.
func readBounded(path string, size int) ([]byte, bool) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, false
	}
	defer file.Close()
	about, err := file.Stat()
	if err != nil || !about.Mode().IsRegular() {
		return nil, false
	}
	data := make([]byte, min(int64(size), about.Size())+1)
	read := 0
	for read < len(data) {
		count, err := file.Read(data[read:])
		read += count
		if err != nil {
			break
		}
	}
	return data[:min(read, size)], read > size || about.Size() > int64(size)
}

// enterable makes a folder where there is none, and gives its owner, if that is us, every right to it: an agent before
// may have removed it or taken the rights. The mount of a pod it cannot touch.
func enterable(folder string) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	about, err := os.Stat(folder)
	if err != nil {
		return err
	}
	const all = 0o700
	mode := about.Mode()
	if int(about.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() || mode&all == all {
		return nil
	}
	return os.Chmod(folder, mode|all)
}

// swept makes the folder in which agents get theirs, or takes out of it what agents of a launcher before this one left
// under such names.
func swept(folder string) error {
	if err := enterable(folder); err != nil {
		return err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ofAgents) {
			continue
		}
		path := filepath.Join(folder, entry.Name())
		if entry.IsDir() {
			err = removeTree(path)
		} else {
			err = os.Remove(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeTree removes a folder whatever an agent left in it: folders without rights, links, nesting deeper than any
// path. Subfolders of a subfolder are moved up one level and taken in turn: neither recursion nor long paths.
func removeTree(folder string) error {
	top, err := openFully(here, folder)
	if err != nil {
		return err
	}
	defer top.Close()
	moved := 0
	for {
		found, err := top.ReadDir(-1)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return os.Remove(folder)
		}
		for _, entry := range found {
			if !entry.IsDir() {
				err = unlink(top, entry.Name(), 0)
			} else {
				err = flatten(top, entry.Name(), &moved)
			}
			if err != nil {
				return err
			}
		}
		if _, err := top.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

// flatten removes a folder of an open one, after moving the folders in it beside it.
func flatten(top *os.File, name string, moved *int) error {
	inner, err := openFully(int(top.Fd()), name)
	if err != nil {
		return err
	}
	defer inner.Close()
	below, err := inner.ReadDir(-1)
	if err != nil {
		return err
	}
	for _, entry := range below {
		if !entry.IsDir() {
			if err := unlink(inner, entry.Name(), 0); err != nil {
				return err
			}
			continue
		}
		// What is moved gets another "..": that needs rights on it.
		folder, err := openFully(int(inner.Fd()), entry.Name())
		if err != nil {
			return err
		}
		folder.Close()
		target := fmt.Sprintf(".moved-%d-%d", os.Getpid(), *moved)
		if err := syscall.Renameat(int(inner.Fd()), entry.Name(), int(top.Fd()), target); err != nil {
			return &fs.PathError{Op: "rename", Path: entry.Name(), Err: err}
		}
		*moved++
	}
	return unlink(top, name, atRemoveDir)
}

// openFully opens a folder after giving its owner every right to it, and never what a link leads to.
func openFully(parent int, name string) (*os.File, error) {
	found, err := syscall.Openat(parent, name, oPath|folderItself, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer syscall.Close(found)
	if err := os.Chmod(fmt.Sprintf("/proc/self/fd/%d", found), 0o700); err != nil {
		return nil, err
	}
	folder, err := syscall.Openat(found, ".", syscall.O_RDONLY|folderItself, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	// By this name even a file system that does not tell folders in its listings can be asked.
	return os.NewFile(uintptr(folder), fmt.Sprintf("/proc/self/fd/%d", folder)), nil
}

func unlink(folder *os.File, name string, flags uintptr) error {
	text, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_UNLINKAT, folder.Fd(), uintptr(unsafe.Pointer(text)), flags)
	if errno != 0 {
		return &fs.PathError{Op: "remove", Path: name, Err: errno}
	}
	return nil
}
