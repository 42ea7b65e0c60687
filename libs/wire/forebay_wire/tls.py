"""TLS for the token path: who we are, whom we trust, and HTTP/2 by ALPN."""

from __future__ import annotations

import ssl

H2 = "h2"
HTTP1 = "http/1.1"


def server_context(
    *, certificate: str, key: str, client_ca: str | None = None, alpn: tuple[str, ...] = (H2,)
) -> ssl.SSLContext:
    """TLS of a server.

    Args:
        certificate: file with the chain, PEM.
        key: file with its private key, PEM.
        client_ca: file with the authorities whose clients are let in; no client certificate is
            asked for when None.
        alpn: protocols that are spoken, best first.

    Raises:
        OSError: a file cannot be read or used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(list(alpn))
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    *, ca: str | None = None, certificate: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """TLS of a client.

    Args:
        ca: file with the authorities that servers are trusted by, PEM; the system's when None.
        certificate: file with our chain, for servers that ask for one.
        key: file with its private key.

    Raises:
        OSError: a file cannot be read or used.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([H2])
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context
