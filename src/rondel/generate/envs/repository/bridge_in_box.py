"""The box's end of a bridge to the gateway: an agent asks 127.0.0.1 as on any machine, and its bytes travel over the
pipes of the box. There is no other network in the box.

frames, both ways   4 bytes connection, 1 byte kind (0 opened, 1 data, 2 closed), 4 bytes length, data
"""

import contextlib
import os
import socket
import struct
import subprocess
import threading

HEADER = struct.Struct(">IBI")
OPENED, DATA, CLOSED = range(3)
PIECE = 1 << 15
OPEN: dict[int, socket.socket] = {}
TURN = threading.Lock()


def send(number, kind, data=b""):
    with TURN:
        whole = HEADER.pack(number, kind, len(data)) + data
        while whole:
            whole = whole[os.write(1, whole) :]


def read_exactly(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(3)
        data += piece
    return data


def pump(number, connection):
    with contextlib.suppress(OSError):
        while piece := connection.recv(PIECE):
            send(number, DATA, piece)
    send(number, CLOSED)


def accept(listener):
    number = 0
    while True:
        connection, _ = listener.accept()
        number += 1
        OPEN[number] = connection
        send(number, OPENED)
        threading.Thread(target=pump, args=(number, connection), daemon=True).start()


def deliver():
    while True:
        number, kind, length = HEADER.unpack(read_exactly(HEADER.size))
        data = read_exactly(length)
        connection = OPEN.get(number)
        if connection is None:
            continue
        with contextlib.suppress(OSError):
            if kind == DATA:
                connection.sendall(data)
            elif kind == CLOSED:
                OPEN.pop(number).shutdown(socket.SHUT_WR)


def serve(argv, folder, programs, env):
    """Runs the agent; `{port}` in its variables is where it is answered. Ends with its exit code."""
    os.environ["PATH"] = f"{programs}:{os.environ.get('PATH', os.defpath)}"
    listener = socket.create_server(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
    for work in (lambda: accept(listener), deliver):
        threading.Thread(target=work, daemon=True).start()
    own = {name: value.replace("{port}", port) for name, value in env.items()}
    try:
        agent = subprocess.run(argv, cwd=folder, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=2)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    os._exit(agent.returncode if agent.returncode >= 0 else 128 - agent.returncode)
