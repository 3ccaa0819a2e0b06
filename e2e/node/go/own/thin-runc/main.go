// thin-runc stands in front of runc on machines whose root has no CAP_SYS_RESOURCE (a container, most virtual build machines):
// there a privileged container, such as a node of kind, is refused with "unable to apply caps: operation not permitted".
// It asks only for what the machine can give: it takes the capability out of the container's configuration, and raises a
// negative oom_score_adj, which needs the same capability, to 0. Then it becomes runc.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

const missing = "CAP_SYS_RESOURCE"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "thin-runc:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch command := subcommand(args); command {
	case "create", "run":
		bundle := option(args, "--bundle", "-b")
		if err := thin(filepath.Join(bundle, "config.json"), func(spec object) object { return child(spec, "process") }); err != nil {
			return err
		}
	case "exec":
		if path := option(args, "--process", "-p"); path != "" {
			if err := thin(path, func(process object) object { return process }); err != nil {
				return err
			}
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ())
}

type object = map[string]any

// subcommand is the first word that is neither a global option nor the value of one.
func subcommand(args []string) string {
	valued := map[string]bool{"--log": true, "--log-format": true, "--root": true, "--criu": true, "--rootless": true}
	for i := 0; i < len(args); i++ {
		switch {
		case valued[args[i]]:
			i++
		case !strings.HasPrefix(args[i], "-"):
			return args[i]
		}
	}
	return ""
}

func option(args []string, names ...string) string {
	for i, arg := range args {
		for _, name := range names {
			if arg == name && i+1 < len(args) {
				return args[i+1]
			}
			if value, found := strings.CutPrefix(arg, name+"="); found {
				return value
			}
		}
	}
	return ""
}

// thin rewrites the process (found in the file by `of`) so that it asks for no more than the machine has.
func thin(path string, of func(object) object) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var whole object
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.UseNumber()
	if err := decoder.Decode(&whole); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	process := of(whole)
	for name, set := range child(process, "capabilities") {
		kept := []any{}
		if names, ok := set.([]any); ok {
			for _, capability := range names {
				if capability != missing {
					kept = append(kept, capability)
				}
			}
		}
		child(process, "capabilities")[name] = kept
	}
	if score, ok := process["oomScoreAdj"].(json.Number); ok && strings.HasPrefix(score.String(), "-") {
		process["oomScoreAdj"] = 0
	}
	written, err := json.Marshal(whole)
	if err != nil {
		return err
	}
	return os.WriteFile(path, written, 0o644)
}

// child is a member that is an object; an empty one stands in for one that is not there.
func child(parent object, name string) object {
	if member, ok := parent[name].(object); ok {
		return member
	}
	return object{}
}
