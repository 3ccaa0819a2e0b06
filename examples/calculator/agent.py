"""A small agent: answers a word problem, with a calculator as its only tool.

The question comes on standard input, the answer goes to standard output. Any OpenAI-compatible endpoint will do:

    echo "There are 12 boxes with 12 eggs each. How many eggs?" | OPENAI_MODEL=gpt-4o-mini python agent.py
"""

import ast
import json
import os
import sys
from typing import Any

from openai import OpenAI

MAX_CALLS = 4
SYSTEM = "Use the calculator. Reply with Answer: <integer>"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
DESCRIPTION = "Evaluates + - * on integers, for example 12*12."
CALCULATOR = {"name": "calculator", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": CALCULATOR}]


def evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return evaluate(left) + evaluate(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return evaluate(left) - evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return evaluate(left) * evaluate(right)
    raise ValueError("only + - * on integers")


def calculator(arguments: str) -> str:
    try:
        expression = json.loads(arguments)["expression"]
        return str(evaluate(ast.parse(expression[:200], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError):
        return "error"


def answer(question: str) -> str:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    model = os.environ.get("OPENAI_MODEL", "policy")
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=40, temperature=1
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = "error"
            if call.type == "function" and call.function.name == "calculator":
                result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


if __name__ == "__main__":
    print(answer(sys.stdin.read().strip()))
