"""tcp: the bytes of a bucket follow its message on the channel, so nothing has to be added to the base class."""

from torchtitan.weight_sync.transports.transport import Transport


class Tcp(Transport):
    """Sockets between any two machines, from host memory to host memory."""

    name = "tcp"


TRANSPORT = Tcp
