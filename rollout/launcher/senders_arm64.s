#include "textflag.h"

// func outsidersOnly(): see senders.go. In R1 the kernel passes what is known of the signal: at 8 how it was sent, at 16
// by whom.
TEXT ·outsidersOnly(SB), NOSPLIT|NOFRAME, $0
	MOVWU 8(R1), R3
	MOVWU 16(R1), R4
	ORR   R3, R4, R3
	CBNZ  R3, drop
	MOVD  ·obeying(SB), R3
	JMP   (R3)

drop:
	RET

// func outsidersOnlyAddress() uintptr
TEXT ·outsidersOnlyAddress(SB), NOSPLIT, $0-8
	MOVD $·outsidersOnly(SB), R3
	MOVD R3, ret+0(FP)
	RET
