"""Docker's health check, inside the container: exit code 0 when the server is ready, 1 and the reason when it is not.

It reads the environment, as the server does, not the server's arguments. Sockets alone: Docker starts this every ten
seconds, and an HTTP client would take twice as long to import as all of this takes to run.
"""

import os
import socket
import sys

_TIMEOUT_S = 4.0  # Docker kills after 5


def status_line() -> bytes:
    """The first line that the server answers to GET /readyz. Raises OSError and ValueError."""
    port = os.environ.get("SPYGLASS_PORT") or "8000"
    if port.startswith("tcp://"):  # a container link of that name; the server doesn't take it for its port either
        port = "8000"
    host = os.environ.get("SPYGLASS_HOST") or "0.0.0.0"  # all addresses: connecting to that reaches this machine
    connection = socket.create_connection((host, int(port)), _TIMEOUT_S)
    if os.environ.get("SPYGLASS_SSL_CERTFILE"):
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # nobody has a certificate for 0.0.0.0
        context.verify_mode = ssl.CERT_NONE
        connection = context.wrap_socket(connection)
    with connection, connection.makefile("rb") as answer:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return answer.readline(1000)


def main() -> int:
    try:
        line = status_line()
    except (OSError, ValueError) as error:
        line = repr(error).encode()
    if line.split()[1:2] == [b"200"]:
        return 0
    print(line.decode(errors="replace").strip(), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
