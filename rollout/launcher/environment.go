package main

import (
	"os"
	"strings"
)

// ours begins the names of variables that are Kitestring's: none of the container's reaches an agent.
const ours = "KITESTRING_"

// defaultPath is searched where nothing says another.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// forgetOurs takes Kitestring's variables out of the environment that agents inherit.
func forgetOurs() {
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, ours) {
			os.Unsetenv(name)
		}
	}
}

// merged is the environment of an agent: env, over the container's own, over defaults. Without defaults env alone.
func merged(defaults, env map[string]string) map[string]string {
	if defaults == nil {
		return env
	}
	result := map[string]string{}
	for name, value := range defaults {
		result[name] = value
	}
	for _, variable := range os.Environ() {
		if name, value, found := strings.Cut(variable, "="); found && name != "" {
			result[name] = value
		}
	}
	for name, value := range env {
		result[name] = value
	}
	return result
}

func pathOf(environment map[string]string) string {
	if path, found := environment["PATH"]; found {
		return path
	}
	return defaultPath
}

func variables(environment map[string]string) []string {
	result := make([]string, 0, len(environment))
	for name, value := range environment {
		result = append(result, name+"="+value)
	}
	return result
}
