"""Chat in the terminal: one question, or a conversation read line by line."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable

from fleet.errors import PacelineError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import ChatMessage, Delta, Failed, Finished, Generate, Sampling
from paceline.terminal import printable

_EXIT_WORDS = frozenset({"/quit", "/exit", "/bye"})
_MOST_TOKENS = 1024
"""Where an answer is cut. Small models may repeat themselves until their context is full."""


async def answer(
    client: GatewayClient, messages: tuple[ChatMessage, ...], on_text: Callable[[str], None], sampling: Sampling
) -> Finished:
    """Stream the answer to a conversation.

    Raises:
        PacelineError: the gateway could not answer; the text names the node at fault.
    """
    request = Generate(
        number=client.next_number(),
        messages=messages,
        sampling=sampling,
        max_tokens=_MOST_TOKENS,
        plain_without_template=True,
    )
    async for message in client.generate(request):
        match message:
            case Delta(text=text):
                on_text(text)
            case Failed(message=reason):
                raise PacelineError(reason)
            case Finished():
                return message
    raise PacelineError("The gateway ended the answer without saying why; try again.")


def write_text(text: str) -> None:
    """Show a piece of an answer at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


async def answer_prompt(client: GatewayClient, prompt: str) -> None:
    """Answer one prompt on standard output, greedily, so that the same prompt gives the same answer."""
    await answer(client, (ChatMessage("user", prompt),), write_text, Sampling())
    write_text("\n")


async def converse(client: GatewayClient, lines: AsyncIterator[str]) -> None:
    """Answer each line, with what was said before as context; ``/new`` starts afresh, ``/quit`` ends.

    A failed answer is told and the conversation goes on without it.
    """
    history: tuple[ChatMessage, ...] = ()
    async for line in lines:
        said = line.strip()
        if said in _EXIT_WORDS:
            return
        if said == "/new":
            history = ()
        if not said or said == "/new":
            continue
        pieces: list[str] = []

        def show(text: str, pieces: list[str] = pieces) -> None:
            pieces.append(text)
            write_text(text)

        asked = (*history, ChatMessage("user", said))
        try:
            finished = await answer(client, asked, show, Sampling())
        except PacelineError as error:
            print(printable(f"\n{error}"), file=sys.stderr)  # noqa: T201
            continue
        history = (*asked, ChatMessage("assistant", "".join(pieces)))
        write_text("\n")
        print(describe(finished), file=sys.stderr)  # noqa: T201


def describe(finished: Finished) -> str:
    """Speed of an answer in words."""
    rate = (finished.completion_tokens - 1) / finished.decode_s if finished.decode_s > 0 else 0.0
    cut = "cut after " if finished.reason == "length" else ""
    return (
        f"({cut}{finished.completion_tokens} tokens, {rate:.1f} tokens/s, "
        f"first token after {finished.time_to_first_token_s * 1000:.0f} ms)"
    )


async def typed_lines() -> AsyncIterator[str]:
    """Lines that a person types, or that are piped in, until the end of the input.

    A thread of its own reads them, a daemon, because nothing can interrupt a blocked read of a terminal on every
    system; the loop stays free to keep the connection alive meanwhile.
    """
    loop = asyncio.get_running_loop()
    wanted = threading.Semaphore(0)
    lines: asyncio.Queue[str] = asyncio.Queue()
    interactive = sys.stdin.isatty()

    def read() -> None:
        while wanted.acquire():
            line = sys.stdin.readline()
            try:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            except RuntimeError:  # the loop was closed while the read was blocked: nobody waits for the line
                return
            if not line:
                return

    threading.Thread(target=read, name="typed-lines", daemon=True).start()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        wanted.release()
        line = await lines.get()
        if not line:
            return
        yield line
