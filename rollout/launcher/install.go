package main

import (
	"io"
	"os"
	"path/filepath"
)

// install copies this program and launcher.py into a folder, for an init container of an image without a shell.
func install(folder string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	if err := place(program, filepath.Join(folder, "launcher"), 0o555); err != nil {
		return err
	}
	return place(filepath.Join(filepath.Dir(program), pythonLauncher), filepath.Join(folder, pythonLauncher), 0o444)
}

// place copies a file; whole under its name, or not at all.
func place(source, target string, mode os.FileMode) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.CreateTemp(filepath.Dir(target), ".install-*")
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if err := to.Chmod(mode); err != nil {
		return err
	}
	return os.Rename(to.Name(), target)
}
