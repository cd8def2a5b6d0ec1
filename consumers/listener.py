"""What a listener of a broker speaks, asked directly, and from that why it does not take us, in words.

kafka-python 3.0.12 loses a broker's last words when the broker closes the connection behind them, which it does after
every refusal. A plain socket reads them.
"""

import socket
import ssl
import struct
from dataclasses import dataclass

from schemas.settings import KafkaSettings

_SASL_HANDSHAKE = 17  # the request's number in Kafka's protocol
_ILLEGAL_SASL_STATE = 34  # its answer from a listener that asks for no password
_MAX_REPLY_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Spoken:
    """What can be told of a listener without being let in."""

    is_tls: bool
    mechanisms: tuple[str, ...] | None = None  # of SASL; (): it asks for no password; None: it did not tell
    asks_certificate: bool = False

    @property
    def protocols(self) -> tuple[str, ...]:
        """The values of kafka.security_protocol that may be right for it."""
        kind = "SSL" if self.is_tls else "PLAINTEXT"
        if self.mechanisms is None:
            return (kind, f"SASL_{kind}")
        return (f"SASL_{kind}",) if self.mechanisms else (kind,)


def ask_listener(host: str, port: int, timeout_seconds: float) -> Spoken | None:
    """Asks it with TLS, certificates unseen, then in clear. None where it answers as no Kafka broker does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing of ours is told to whoever it is
    try:
        plain = socket.create_connection((host, port), timeout_seconds)
        with plain, context.wrap_socket(plain, server_hostname=host) as connection:
            try:
                return Spoken(True, _ask_mechanisms(connection))
            except OSError as error:  # a TLS 1.3 server refuses a client's certificate after the handshake
                return Spoken(True, asks_certificate="ALERT" in str(error))
    except OSError as error:
        if "ALERT_HANDSHAKE_FAILURE" in str(error) or "ALERT_BAD_CERTIFICATE" in str(error):
            return Spoken(True, asks_certificate=True)  # one of TLS 1.2 within it
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            mechanisms = _ask_mechanisms(connection)
    except OSError:
        return None
    return None if mechanisms is None else Spoken(False, mechanisms)


def why_refused(settings: KafkaSettings, said: str, spoken: Spoken | None) -> str | None:
    """Why a listener does not take us, and what to do; None where it is no Kafka broker's.

    `said` are the client's words for it.
    """
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return _why_not_trusted(settings, said)
    if spoken is None:
        return None
    if settings.security_protocol not in spoken.protocols:
        return (
            f"kafka.security_protocol is {settings.security_protocol!r}, and this listener speaks "
            f"{' or '.join(spoken.protocols)}"
        )
    if spoken.mechanisms and settings.sasl_mechanism not in spoken.mechanisms:
        return (
            f"kafka.sasl_mechanism is {settings.sasl_mechanism!r}, and this listener takes "
            f"{' and '.join(spoken.mechanisms)}"
        )
    if spoken.asks_certificate or "ALERT" in said:
        if settings.ssl_certificate_file is None:
            return "it asks for a certificate of ours: give kafka.ssl_certificate_file and kafka.ssl_key_file"
        return (
            f"it refuses our certificate, kafka.ssl_certificate_file ({said}): it must be signed by an authority that "
            "the broker trusts, and not have expired"
        )
    return said


def _why_not_trusted(settings: KafkaSettings, said: str) -> str:
    reason = said.rpartition("certificate verify failed: ")[2].partition(" (_ssl")[0].rstrip(".")
    if "expired" in reason or "not yet valid" in reason:
        return f"its certificate is out of date ({reason}): the broker needs a new one, or this machine the right time"
    if "mismatch" in reason or "not valid for" in reason:
        return (
            f"its certificate was made for another name ({reason}): kafka.bootstrap_servers, and the broker's own "
            "advertised.listeners, must name it as its certificate does"
        )
    if settings.ssl_ca_file is None:
        return (
            f"its certificate is not trusted ({reason}): this machine does not know the authority that signed it; give "
            "that one's certificate as kafka.ssl_ca_file"
        )
    return f"its certificate is not trusted ({reason}): kafka.ssl_ca_file must hold the authority that signed it"


def _ask_mechanisms(connection: socket.socket) -> tuple[str, ...] | None:
    """The SASL mechanisms that the listener takes, () where it asks for no password; None for no answer of a broker's.

    Raises OSError where the connection breaks otherwise than by its end.
    """
    mechanism = b"PLAIN"
    request = struct.pack(">hhih", _SASL_HANDSHAKE, 1, 1, -1) + struct.pack(">h", len(mechanism)) + mechanism
    connection.sendall(struct.pack(">i", len(request)) + request)
    if (head := _receive(connection, 4)) is None:
        return None
    (num_bytes,) = struct.unpack(">i", head)
    if not 10 <= num_bytes <= _MAX_REPLY_BYTES or (reply := _receive(connection, num_bytes)) is None:
        return None
    _, error_code, num_mechanisms = struct.unpack_from(">ihi", reply)
    if error_code == _ILLEGAL_SASL_STATE:
        return ()
    mechanisms = []
    at = 10
    for _ in range(num_mechanisms):
        if at + 2 > num_bytes:
            return None
        (length,) = struct.unpack_from(">h", reply, at)
        mechanisms.append(reply[at + 2 : at + 2 + length].decode("ascii", "replace"))
        at += 2 + max(0, length)
    return tuple(sorted(mechanisms))


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = b""
    while len(received) < num_bytes:
        if not (part := connection.recv(num_bytes - len(received))):
            return None
        received += part
    return received
