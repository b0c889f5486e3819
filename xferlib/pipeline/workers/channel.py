"""Messages of any size between two processes, over a socket that only they hold.

If two processes each wait until the other has read, both wait for ever. So the parent's side never waits: `Channel` keeps what does
not go out at once, and reads meanwhile. A worker's side, `send` and `receive`, may wait as long as it likes.

If a process is killed, it can leave a shared queue locked, but not a socket that only two processes hold.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from typing import Any, final

__all__ = ["Channel", "receive", "send"]

HEADER = struct.Struct("!Q")
"""The size of the message behind it."""
RECEIVE_NBYTES = 256 << 10
"""What is read at once: about what a socket holds."""


@final
class Channel:
    """The parent's side. It never blocks. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.over = False
        """The other side has hung up, or is dead. What it said before still comes."""
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._heard = bytearray()

    def fileno(self) -> int:
        """Return the descriptor to be waited for; -1 if it is closed."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something is left to be sent, by `flush`, when there is room."""
        return bool(self._unsent) and not self.over

    def send(self, message: object) -> None:
        """Send a message, or keep what has no room yet."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._unsent += (memoryview(HEADER.pack(len(data))), memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self.pending:
                sent = self._socket.send(self._unsent[0])
                rest = self._unsent[0][sent:]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.over = True

    def receive(self) -> list[Any]:
        """Return the messages that have come completely."""
        try:
            while data := self._socket.recv(RECEIVE_NBYTES):
                self._heard += data
            self.over = True
        except BlockingIOError:
            pass
        except OSError:
            self.over = True
        messages = []
        while (message := self._cut_off()) is not None:
            messages.append(pickle.loads(message))
        return messages

    def close(self) -> None:
        """Hang up. Twice is fine."""
        self.over = True
        self._socket.close()

    def _cut_off(self) -> bytearray | None:
        if len(self._heard) < HEADER.size:
            return None
        (nbytes,) = HEADER.unpack_from(self._heard)
        end = HEADER.size + nbytes
        if len(self._heard) < end:
            return None
        message = self._heard[HEADER.size : end]
        del self._heard[:end]
        return message


def send(sock: socket.socket, message: object) -> None:
    """Send a message, waiting until it is out. Raises `ConnectionError`."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    sock.sendall(HEADER.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Wait for a message and return it. Raises `EOFError` once the other side has hung up, and `ConnectionError`."""
    (nbytes,) = HEADER.unpack(_exactly(sock, HEADER.size))
    return pickle.loads(_exactly(sock, nbytes))


def _exactly(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    left = memoryview(data)
    while left:
        count = sock.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return data
