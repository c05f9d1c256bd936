"""An all-gather of bytes over TCP, for worlds that nobody but the environment describes.

Rank 0 listens on the rendezvous address, takes every other rank's bytes, and sends all of them back. The listener
lives as long as one gather, so nothing is left behind and the next gather (a second ``init``) begins anew.

Who connects must prove that it knows the key before anything it sends is looked at: both sides answer the other's
random challenge with an HMAC-SHA256, and the payloads carry one under a key of this connection. Nothing is unpickled:
the messages are fixed binary structs and byte strings with a length limit. A stranger is dropped and logged, and does
not hold up the others, because rank 0 serves all connections from one selector loop with a deadline for each.

    rank 0 -> peer   magic, nonce (32)
    peer -> rank 0   nonce (32), rank u32, size u32, generation u32, world (32), proof (32)
    rank 0 -> peer   proof (32)
    peer -> rank 0   length u64, MAC (32), bytes
    rank 0 -> peer   status u8, length u64, MAC (32), bytes: count u32, then length u64 + bytes by rank; or a message

``world`` is zero in the first gather, then the digest of what the last one gave to all ranks. So a rank that was in a
world of an earlier attempt, with the same key, does not get into a later gather of this one.

A rank that comes before rank 0 listens tries again until its deadline.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import time

from sparkvod import log
from sparkvod.errors import CollectiveTimeoutError, HorovodInternalError, LaunchError
from sparkvod.launch import descriptors

MAX_BYTES = 16 << 20
HANDSHAKE_SECONDS = 10.0
_MAGIC = b"SPKVRDV2"
_NONCE = _PROOF = 32
_HELLO = struct.Struct("!III32s")
_HELLO_BYTES = _NONCE + _HELLO.size + _PROOF
_HEAD = struct.Struct("!Q32s")
# Rank 0 gives up at the same deadline, and its answer, which names the missing ranks, is worth waiting for.
_ANSWER_SECONDS = 2.0
# So long rank 0 waits for the others when it cannot gather, to tell them why.
_FAREWELL_SECONDS = 0.5
_STATUS_OK, _STATUS_ERROR, _STATUS_LATE = 0, 1, 2


class Rendezvous:
    """A repeatable all-gather among ``size`` processes that know an address and a key.

    Args:
        rank: this process's rank.
        size: number of ranks.
        address: (host, port) on which rank 0 listens and which the others can reach.
        key: what all ranks know and strangers do not.
        timeout: seconds within which one gather must end.
        variable: the environment variable that the address's host came from, for messages.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: tuple[str, int],
        key: bytes,
        timeout: float,
        variable: str = "SPARKVOD_RENDEZVOUS",
    ) -> None:
        self._variable = variable
        self.rank, self.size, self.address, self.timeout = rank, size, address, timeout
        self._key = hashlib.sha256(b"sparkvod rendezvous\0" + key).digest()
        self._generation = 0
        self._world = bytes(32)

    def __call__(self, data: bytes) -> list[bytes]:
        """Gathers ``data`` (at most 16 MiB) of all ranks; returns everybody's in rank order.

        Raises:
            CollectiveTimeoutError: not all ranks came within the deadline; names those that are missing.
            LaunchError: two processes claim one rank, sizes differ, or rank 0 cannot listen.
            HorovodInternalError: this process, or that of rank 0, has no descriptor left.
            ValueError: ``data`` is too long.
        """
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes were given to the rendezvous, at most {MAX_BYTES} are carried")
        deadline = time.monotonic() + self.timeout
        begun = True
        try:
            if self.size == 1:
                return [data]
            return self._serve(data, deadline) if self.rank == 0 else self._join(data, deadline)
        except OSError as e:
            problem = self._out_of_descriptors(e)
            if problem is None:
                raise
            begun = False  # the others wait for it still
            raise problem from e
        finally:
            self._generation += begun

    def _out_of_descriptors(self, error: OSError) -> HorovodInternalError | None:
        where = f"rendezvous {self.address[0]}:{self.address[1]}"
        doing = f"serve the {where}" if self.rank == 0 else f"connect to the {where}"
        return descriptors.complaint(error, f"rank {self.rank} cannot {doing}")

    # --- rank 0 -------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        host, port = self.address
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (socket.gaierror, UnicodeError) as e:
            raise LaunchError(self._unknown_host(e)) from e
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(info[4])
            except OSError as e:
                # The address may belong to a gateway in front of this host (a service address, a translated one).
                if e.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.bind(("::" if info[0] == socket.AF_INET6 else "", port))
            listener.listen(self.size + 16)
            listener.setblocking(False)
        except OSError as e:
            listener.close()
            raise LaunchError(
                f"rank 0 cannot listen on the rendezvous {host}:{port} ({e.strerror}), a free port of this host was "
                "expected; choose another one in SPARKVOD_RENDEZVOUS (or MASTER_PORT)"
            ) from e
        return listener

    def _unknown_host(self, error: Exception) -> str:
        return (
            f"rank {self.rank} cannot resolve the host {self.address[0]!r} of {self._variable} ({error}), a name or "
            "address of rank 0's host was expected; check the variable and this host's name service"
        )

    def _serve(self, data: bytes, deadline: float) -> list[bytes]:
        arrived: dict[int, _Guest] = {}
        problem: HorovodInternalError | None = None
        # A descriptor in reserve: without any, nobody could be told that there is none.
        with selectors.DefaultSelector() as selector, self._listen() as listener, listener.dup() as spare:
            selector.register(listener, selectors.EVENT_READ, None)
            guests: set[_Guest] = set()
            try:
                while len(arrived) < self.size - 1:
                    now = time.monotonic()
                    if now >= deadline:
                        if problem is not None:
                            break
                        self._give_up(arrived)
                    for guest in [g for g in guests if g.payload is None and now > g.deadline]:
                        guest.drop(selector, guests, "it did not finish the handshake in time")
                    for key, _ in selector.select(min(deadline - now, 0.5)):
                        if key.data is None:
                            try:
                                self._accept(listener, selector, guests)
                            except HorovodInternalError as e:
                                if problem is None and not self._wait_for_room(selector, guests):
                                    spare.close()
                                    problem, deadline = e, min(deadline, now + _FAREWELL_SECONDS)
                                    for guest in arrived.values():
                                        guest.refuse(selector, guests, str(problem))
                        elif key.data.read(self._key, self._generation, self._world):
                            self._welcome(key.data, arrived, selector, guests)
                            if problem is not None:
                                key.data.refuse(selector, guests, str(problem))
                        elif key.data.closed:
                            arrived = {r: g for r, g in arrived.items() if g is not key.data}
                            key.data.drop(selector, guests, key.data.closed)
                if problem is not None:
                    raise problem
                everybody = [data] + [arrived[r].payload or b"" for r in range(1, self.size)]
                reply = struct.pack("!I", self.size) + b"".join(struct.pack("!Q", len(b)) + b for b in everybody)
                self._world = hashlib.sha256(reply).digest()
                for guest in arrived.values():
                    guest.answer(_STATUS_OK, reply, deadline)
                return everybody
            finally:
                for guest in guests:
                    guest.sock.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector, guests: set[_Guest]) -> None:
        try:
            sock, peer = listener.accept()
        except OSError as e:
            problem = self._out_of_descriptors(e)
            if problem is not None:
                raise problem from e
            return  # gone again before it was accepted
        if len(guests) >= self.size + 256:
            sock.close()
            log.get("launch").warning("dropped a connection from %s: too many that prove nothing", peer[0])
            return
        guest = _Guest(sock, str(peer[0]))
        guests.add(guest)
        selector.register(sock, selectors.EVENT_READ, guest)
        guest.greet()

    def _wait_for_room(self, selector: selectors.BaseSelector, guests: set[_Guest]) -> bool:
        """Tells whether there may be a descriptor again soon: strangers hold some, and have to go after a second."""
        strangers = [guest for guest in guests if guest.rank < 0]
        if strangers:
            oldest = min(strangers, key=lambda guest: guest.deadline)
            if oldest.deadline - time.monotonic() < HANDSHAKE_SECONDS - 1:
                oldest.drop(selector, guests, "no descriptor is left")
            else:
                time.sleep(0.01)
        return bool(strangers)

    def _welcome(
        self, guest: _Guest, arrived: dict[int, _Guest], selector: selectors.BaseSelector, guests: set[_Guest]
    ) -> None:
        problem = ""
        if guest.size != self.size:
            problem = f"rank {guest.rank} says that the world has {guest.size} ranks, rank 0 says {self.size}"
        elif not 1 <= guest.rank < self.size:
            problem = f"a process claims rank {guest.rank}, a rank from 1 to {self.size - 1} was expected"
        elif guest.rank in arrived:
            problem = f"two processes claim rank {guest.rank} ({arrived[guest.rank].peer} and {guest.peer})"
        if not problem:
            arrived[guest.rank] = guest
            return
        # A mistake of whoever started the ranks: everybody is told, so that nobody waits for its deadline.
        problem += "; check what sets the ranks' environment"
        for other in [guest, *arrived.values()]:
            other.answer(_STATUS_ERROR, problem.encode(), time.monotonic() + 1)
        raise LaunchError(problem)

    def _give_up(self, arrived: dict[int, _Guest]) -> None:
        missing = [r for r in range(1, self.size) if r not in arrived]
        names = f"rank{'s' * (len(missing) > 1)} {','.join(map(str, missing))}"
        problem = (
            f"{names} of {self.size} had not come to the rendezvous {self.address[0]}:{self.address[1]} after "
            f"{self.timeout:g} s; start them, or raise SPARKVOD_START_TIMEOUT"
        )
        for guest in arrived.values():
            guest.answer(_STATUS_LATE, problem.encode(), time.monotonic() + 1)
        raise CollectiveTimeoutError(problem)

    # --- the other ranks ----------------------------------------------------------------------------------------

    def _join(self, data: bytes, deadline: float) -> list[bytes]:
        reason, unknown = "nobody listens", ""
        pause = 0.01
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection(self.address, timeout=left) as sock:
                    return self._exchange(sock, data, deadline + _ANSWER_SECONDS)
            except UnicodeError as e:  # no host can have such a name
                raise LaunchError(self._unknown_host(e)) from e
            except (OSError, EOFError) as e:
                if isinstance(e, OSError) and self._out_of_descriptors(e):
                    raise
                # A name may come into being with its host, as those of pods do: so it is tried until the deadline.
                unknown = self._unknown_host(e) if isinstance(e, socket.gaierror) else ""
                if unknown and reason != unknown:
                    log.get("launch").warning("%s; trying again for %.0f s", unknown, left)
                reason = unknown or str(e) or type(e).__name__
            time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 1.5, 0.25)
        if unknown:
            raise LaunchError(f"{unknown} (tried for {self.timeout:g} s)")
        raise CollectiveTimeoutError(
            f"rank {self.rank} could not gather at the rendezvous {self.address[0]}:{self.address[1]} within "
            f"{self.timeout:g} s (last: {reason}), rank 0 was expected to listen there with the same secret; start it, "
            "or raise SPARKVOD_START_TIMEOUT"
        )

    def _exchange(self, sock: socket.socket, data: bytes, deadline: float) -> list[bytes]:
        greeting = _receive(sock, len(_MAGIC) + _NONCE, deadline)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise EOFError("something else than rank 0 listens there")
        theirs, mine = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        claim = _HELLO.pack(self.rank, self.size, self._generation, self._world)
        sock.sendall(mine + claim + _mac(self._key, b"peer", theirs, mine, claim))
        if not hmac.compare_digest(_receive(sock, _PROOF, deadline), _mac(self._key, b"root", mine, theirs, claim)):
            raise EOFError("what listens there does not know the secret")
        session = _mac(self._key, b"session", theirs, mine, claim)
        sock.sendall(_HEAD.pack(len(data), _mac(session, b"up", data)) + data)
        status = _receive(sock, 1, deadline)[0]
        length, mac = _HEAD.unpack(_receive(sock, _HEAD.size, deadline))
        if length > self.size * (MAX_BYTES + 8) + 4:
            raise EOFError(f"a reply of {length} bytes was announced")
        reply = _receive(sock, length, deadline)
        if not hmac.compare_digest(mac, _mac(session, b"down%d" % status, reply)):
            raise EOFError("the reply was changed on its way")
        if status != _STATUS_OK:  # what rank 0 raises
            raise (CollectiveTimeoutError if status == _STATUS_LATE else LaunchError)(reply.decode())
        self._world = hashlib.sha256(reply).digest()
        return _split(reply)


class _Guest:
    """One connection at rank 0, a stranger until it has proved the key: reads what comes without ever blocking."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self.sock, self.peer = sock, peer
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.rank = self.size = -1
        self.payload: bytes | None = None
        self.closed = ""
        self._nonce = secrets.token_bytes(_NONCE)
        self._session = b""
        self._buffer = bytearray()

    def greet(self) -> None:
        self._send(_MAGIC + self._nonce)

    def read(self, key: bytes, generation: int, world: bytes) -> bool:
        """Takes what has come; True when this call completed the peer's payload. ``closed`` says why it ended."""
        try:
            chunk = self.sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError as e:
            self.closed = str(e)
            return False
        if not chunk or self.payload is not None:
            self.closed = "it closed the connection" if not chunk else "it sent more than its payload"
            return False
        self._buffer += chunk
        if not self._session and not self._prove(key, generation, world):
            return False
        return self._take_payload()

    def _prove(self, key: bytes, generation: int, world: bytes) -> bool:
        if len(self._buffer) < _HELLO_BYTES:
            return False
        hello = bytes(self._buffer[:_HELLO_BYTES])
        del self._buffer[:_HELLO_BYTES]
        theirs, claim, proof = hello[:_NONCE], hello[_NONCE:-_PROOF], hello[-_PROOF:]
        if not hmac.compare_digest(proof, _mac(key, b"peer", self._nonce, theirs, claim)):
            self.closed = "it does not know the secret"
            return False
        self.rank, self.size, theirs_generation, theirs_world = _HELLO.unpack(claim)
        if theirs_generation != generation:
            # It has already got the previous gather's reply and is early for the next: it will come again.
            self.closed = f"it is in gather {theirs_generation}, this is {generation}"
            return False
        if theirs_world != world:
            self.rank = -1
            self.closed = "it was in another world with the same secret: a process of an earlier attempt"
            return False
        self._session = _mac(key, b"session", self._nonce, theirs, claim)
        self._send(_mac(key, b"root", theirs, self._nonce, claim))
        return not self.closed

    def _take_payload(self) -> bool:
        if len(self._buffer) < _HEAD.size:
            return False
        length, mac = _HEAD.unpack_from(self._buffer)
        if length > MAX_BYTES:
            self.closed = f"it announced {length} bytes, at most {MAX_BYTES} are taken"
            return False
        if len(self._buffer) < _HEAD.size + length:
            return False
        payload = bytes(self._buffer[_HEAD.size :])
        if len(payload) != length or not hmac.compare_digest(mac, _mac(self._session, b"up", payload)):
            self.closed = "its payload was changed on its way"
            return False
        self.payload = payload
        return True

    def answer(self, status: int, reply: bytes, deadline: float) -> None:
        """Sends the end of the gather; a peer that has gone meanwhile will notice by itself."""
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.1))
            head = _HEAD.pack(len(reply), _mac(self._session, b"down%d" % status, reply))
            self.sock.sendall(bytes([status]) + head + reply)
        except OSError as e:
            log.get("launch").warning("rank %d at %s did not take the gathered bytes: %s", self.rank, self.peer, e)

    def refuse(self, selector: selectors.BaseSelector, guests: set[_Guest], problem: str) -> None:
        """Tells a peer why there will be no gather, and lets it go."""
        self.answer(_STATUS_ERROR, problem.encode(), time.monotonic() + 1)
        selector.unregister(self.sock)
        guests.discard(self)
        self.sock.close()

    def drop(self, selector: selectors.BaseSelector, guests: set[_Guest], reason: str) -> None:
        # A rank that comes too early or goes is no stranger, and comes again.
        level = logging.WARNING if self.rank < 0 else logging.DEBUG
        log.get("launch").log(level, "dropped a connection from %s: %s", self.peer, reason)
        selector.unregister(self.sock)
        guests.discard(self)
        self.sock.close()

    def _send(self, data: bytes) -> None:
        try:  # some 40 bytes into an empty socket buffer: they fit, or the connection is dead
            if self.sock.send(data) != len(data):
                self.closed = "its connection is stuck"
        except OSError as e:
            self.closed = str(e)


def _mac(key: bytes, *parts: bytes) -> bytes:
    # Each part is preceded by its length, so that no two lists of parts give the same text.
    return hmac.digest(key, b"".join(struct.pack("!Q", len(p)) + p for p in parts), "sha256")


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(data)} of {count} bytes came in time")
        sock.settimeout(left)
        chunk = sock.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError("rank 0 closed the connection")
        data += chunk
    return bytes(data)


def _split(reply: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("!I", reply)
    parts, at = [], 4
    for _ in range(count):
        (length,) = struct.unpack_from("!Q", reply, at)
        parts.append(reply[at + 8 : at + 8 + length])
        at += 8 + length
    return parts
