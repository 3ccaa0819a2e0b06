// The launcher: starts agents in the agent's own container, and ends every process that one of them leaves behind.
//
//	worker ──control socket──► launcher ──► guardian (one per attempt) ──► agent
//	   └───────────channel per attempt────────────►┘
//
// One static binary without needs of its own, so that any image will do. It does what launcher.py does
// (rollout/kitestring_rollout/launcher), speaks the same messages and uses the same words; launcher.py says why things
// are done as they are. It holds no credential, only what the agents get anyway.
package main

import (
	"fmt"
	"os"
	"runtime"
)

const usage = `usage: launcher --socket PATH   start agents for the worker that listens at PATH
       launcher install FOLDER  copy this program and launcher.py into FOLDER
       launcher version`

// Exit codes of the launcher. Only 0 says that there is nothing more to do.
const (
	exitEnded      = 0   // the worker said that the run has ended, or its one rollout
	exitBroken     = 1   // a fault of ours
	exitWorkerGone = 3   // the worker went without a word: its agents were ended
	exitUsage      = 64  // wrong arguments (sysexits.h); not 2, by which the runtime ends what it cannot go on with
	exitTerminated = 143 // the worker was stopped, and what was running has ended; or SIGTERM before a worker came
)

// What runs below the launcher is this program too, under these names.
const (
	asGuardian = "guardian"
	asAgent    = "agent"
)

func init() {
	// Children get a signal when the thread that made them ends: all are made by the first, which stays.
	runtime.LockOSThread()
	runtime.GOMAXPROCS(1)
}

func main() {
	arguments := os.Args[1:]
	switch {
	case len(arguments) == 2 && arguments[0] == "--socket":
		os.Exit(launch(arguments[1]))
	case len(arguments) == 1 && arguments[0] == asGuardian:
		os.Exit(guard())
	case len(arguments) == 1 && arguments[0] == asAgent:
		os.Exit(becomeAgent())
	case len(arguments) == 2 && arguments[0] == "install":
		if err := install(arguments[1]); err != nil {
			fmt.Fprintf(os.Stderr, "launcher: cannot install: %v\n", err)
			os.Exit(exitBroken)
		}
	case len(arguments) == 1 && arguments[0] == "version":
		fmt.Println("kitestring launcher, " + runtime.Version())
	default:
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(exitUsage)
	}
}
