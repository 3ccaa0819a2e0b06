package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fill leaves in a folder what an agent may leave.
func fill(t *testing.T, top, outside string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(top, "a", "b", "c"), 0o700))
	must(t, os.Symlink(outside, filepath.Join(top, "a", "link")))
	must(t, os.Symlink(top, filepath.Join(top, "loop")))
	must(t, syscall.Mkfifo(filepath.Join(top, "a", "pipe"), 0o600))
	must(t, os.WriteFile(filepath.Join(top, "a", "b", "c", "file"), nil, 0o600))
	must(t, os.WriteFile(filepath.Join(top, "\xff\xfe"), nil, 0o600))
	for _, folder := range []string{"a/b/c", "a/b", "a", "."} {
		must(t, os.Chmod(filepath.Join(top, folder), 0))
	}
}

func TestRemoveTree(t *testing.T) {
	folder := t.TempDir()
	top, outside := filepath.Join(folder, "top"), filepath.Join(folder, "outside")
	must(t, os.MkdirAll(outside, 0o700))
	must(t, os.WriteFile(filepath.Join(outside, "kept"), nil, 0o600))
	fill(t, top, outside)
	must(t, removeTree(top))
	if _, err := os.Lstat(top); !os.IsNotExist(err) {
		t.Error("still there")
	}
	if _, err := os.Stat(filepath.Join(outside, "kept")); err != nil {
		t.Error(err)
	}
}

func TestRemoveTreeDeeperThanAnyPath(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	must(t, os.Mkdir(top, 0o700))
	folder, err := syscall.Open(top, syscall.O_RDONLY, 0)
	must(t, err)
	name := strings.Repeat("x", 200)
	for range 60 {
		must(t, syscall.Mkdirat(folder, name, 0o700))
		inner, err := syscall.Openat(folder, name, syscall.O_RDONLY, 0)
		must(t, err)
		syscall.Close(folder)
		folder = inner
	}
	syscall.Close(folder)
	must(t, removeTree(top))
}

func TestRemoveTreeFollowsNoLink(t *testing.T) {
	folder := t.TempDir()
	target := filepath.Join(folder, "real")
	must(t, os.Mkdir(target, 0o500))
	must(t, os.Symlink(target, filepath.Join(folder, "top")))
	if removeTree(filepath.Join(folder, "top")) == nil {
		t.Error("followed a link")
	}
	about, err := os.Stat(target)
	must(t, err)
	if about.Mode().Perm() != 0o500 {
		t.Error("gave rights to what a link leads to")
	}
}

func TestSwept(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a", "b")
	must(t, swept(folder))
	fill(t, filepath.Join(folder, ofAgents+"1"), folder)
	must(t, os.WriteFile(filepath.Join(folder, ofAgents+"2"), nil, 0))
	must(t, os.Symlink(t.TempDir(), filepath.Join(folder, ofAgents+"3")))
	must(t, os.WriteFile(filepath.Join(folder, "kept"), nil, 0))
	must(t, os.Chmod(folder, 0o007))
	must(t, swept(folder))
	entries, err := os.ReadDir(folder)
	must(t, err)
	if len(entries) != 1 || entries[0].Name() != "kept" {
		t.Error(entries)
	}
	about, err := os.Stat(folder)
	must(t, err)
	if about.Mode().Perm() != 0o707 {
		t.Error(about.Mode())
	}
}

func TestScratchWhereAnAgentMeddledWithWhatItLiesIn(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "parent")
	for number, meddle := range []func() error{
		func() error { return nil },
		func() error { return os.Chmod(parent, 0) },
		func() error { return os.RemoveAll(parent) },
		func() error { return os.Rename(parent, parent+"-elsewhere") },
	} {
		must(t, meddle())
		stdin, err := makeScratch(&AgentStart{Scratch: filepath.Join(parent, strconv.Itoa(number))})
		must(t, err)
		syscall.Close(stdin)
	}
}

func TestReadBounded(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	must(t, os.WriteFile(file, []byte("abcde"), 0o600))
	for size, expected := range map[int]string{0: "", 3: "abc", 5: "abcde", 9: "abcde"} {
		data, cut := readBounded(file, size)
		if string(data) != expected || cut != (size < 5) {
			t.Errorf("%d bytes: %q, %v", size, data, cut)
		}
	}
	must(t, os.Symlink(file, filepath.Join(folder, "link")))
	must(t, syscall.Mkfifo(filepath.Join(folder, "pipe"), 0o600))
	for _, name := range []string{"link", "pipe", "none", "."} {
		if data, cut := readBounded(filepath.Join(folder, name), 9); len(data) != 0 || cut {
			t.Errorf("%s: %q", name, data)
		}
	}
}
