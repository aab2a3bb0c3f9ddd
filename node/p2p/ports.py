"""Whether a TCP port is ours to take, asked before a library that would share a busy one."""

import errno
import ipaddress
import socket

from .transport import AddressInUse, TransportError


def check_free(host: str, port: int) -> None:
    """Return if the TCP port of the IP address `host` can be bound; 0 asks about `host` alone.

    Raises:
        AddressInUse: another program listens there, even one that set SO_REUSEPORT.
        TransportError: `host` is no IP address, or not one of this machine's.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise TransportError(f"{host!r} is no IP address: set network.host to one") from error
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a server would: without it, a port whose last owner just left looks busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"TCP port {port} of {host} is in use: free it, or choose another one"
                    " (0 takes any)"
                ) from error
            raise TransportError(
                f"cannot listen on {host}, TCP port {port} ({error.strerror}):"
                " choose an address of this machine"
            ) from error
