#include "textflag.h"

// func outsidersOnly(): see senders.go. In SI the kernel passes what is known of the signal: at 8 how it was sent, at 16
// by whom.
TEXT ·outsidersOnly(SB), NOSPLIT|NOFRAME, $0
	MOVL 8(SI), AX
	ORL  16(SI), AX
	JNE  drop
	MOVQ ·obeying(SB), AX
	JMP  AX

drop:
	RET

// func outsidersOnlyAddress() uintptr
TEXT ·outsidersOnlyAddress(SB), NOSPLIT, $0-8
	MOVQ $·outsidersOnly(SB), AX
	MOVQ AX, ret+0(FP)
	RET
