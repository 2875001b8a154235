"""A real deployment on this machine: a SuperLink and SuperNodes as processes of their own, with TLS and node keys.

    python deploy.py                 # three SuperNodes, ten rounds
    python deploy.py --intruder      # a fourth one whose key nobody enrolled: it is refused
    python deploy.py --app one-trip  # Flower's quickstart with FedGA

Everything it makes (certificates, keys, logs, the run) lies in one folder. It listens on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    """Return a private key as text, without a password."""
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make_certificates(folder: Path) -> None:
    """Make a certificate authority and, signed by it, the SuperLink's certificate for 127.0.0.1."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC)

    def builder(name: str, issuer: str, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )

    root = builder("example authority", "example authority", authority.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    root = root.add_extension(_usage(signs=True), critical=True)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = builder("127.0.0.1", "example authority", server.public_key())
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for name, certificate in (("ca", root), ("server", leaf)):
        signed = certificate.sign(authority, hashes.SHA384())
        (folder / f"{name}.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    write_private(folder / "server.key", pem(server, serialization.PrivateFormat.PKCS8))


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    flags = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=True, key_cert_sign=signs, crl_sign=signs, **flags)


def make_node_key(path: Path) -> None:
    """Make a SuperNode's key pair: ``path`` and ``path.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public)


class Deployment:
    """A SuperLink, its SuperNodes and their folder; leaving the ``with`` block ends every process."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder, self.count = folder.resolve(), nodes
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.bin = Path(sys.executable).parent
        home = self.folder / "flwr-home"
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # what the apps need is installed already
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}",  # SuperLink and SuperNodes call their like
        }
        home.mkdir(parents=True, exist_ok=True)
        certificates = self.folder / "certificates"
        make_certificates(certificates)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{certificates / "ca.crt"}"\n',
            encoding="utf-8",
        )

    def log(self, name: str) -> str:
        """Return what a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.bin / str(words[0])), *(str(word) for word in words[1:])],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,  # with its children it can then be ended as one
            )
        self.processes[name] = process
        return process

    def start_superlink(self, seconds: float = 60.0) -> None:
        """Start the SuperLink and wait until it listens."""
        certificates = self.folder / "certificates"
        process = self._start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", self.port),
            *("--ssl-ca-certfile", certificates / "ca.crt", "--ssl-certfile", certificates / "server.crt"),
            *("--ssl-keyfile", certificates / "server.key", "--enable-supernode-auth"),
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError("the SuperLink did not start:\n" + self.log("superlink"))

    def flwr(self, *words: object) -> str:
        """Run the flwr command line and return what it says."""
        command = [str(self.bin / "flwr"), *(str(word) for word in words)]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(command[1:])} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start_node(self, client: int, *, enrol: bool = True) -> subprocess.Popen[bytes]:
        """Make a key, enrol it, and start the SuperNode of this client."""
        name = f"node{client}"
        key = self.folder / "keys" / name
        key.parent.mkdir(parents=True, exist_ok=True)
        make_node_key(key)
        if enrol:
            self.flwr("supernode", "register", f"{key}.pub", "here")
        return self._start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", self.folder / "certificates" / "ca.crt"),
            *("--auth-supernode-private-key", key, "--host", "127.0.0.1", "--port", free_port()),
            *("--node-config", f"partition-id={client} num-partitions={self.count}"),
        )

    def run(self, app: Path = HERE, **config: object) -> subprocess.Popen[bytes]:
        """Send an app off with ``flwr run``; the process ends with the run, and ``run.log`` has the server's words."""
        values = {"num-clients": self.count, "out": str(self.folder / "run")} if app == HERE else {}
        quoted = " ".join(f"{key}={_toml(value)}" for key, value in (values | config).items())
        return self._start("run", "flwr", "run", app, "here", "--stream", "--run-config", quoted)

    def kill(self, name: str) -> None:
        """End a process and its children at once, as a power cut would."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def __enter__(self) -> Deployment:
        try:
            self.start_superlink()
            with ThreadPoolExecutor() as at_once:
                list(at_once.map(self.start_node, range(self.count)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                try:
                    os.killpg(process.pid, end)
                except ProcessLookupError:
                    continue
            wait_until = time.monotonic() + 5.0
            while time.monotonic() < wait_until and any(p.poll() is None for p in self.processes.values()):
                time.sleep(0.1)
        for process in self.processes.values():
            process.wait()


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    """Run the app on a deployment of its own and show the server's words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("deployment"), help="where everything is written")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--app", type=Path, default=HERE, help="another app to run, for example one-trip")
    parser.add_argument("--intruder", action="store_true", help="also start a SuperNode whose key is not enrolled")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; remove it or give another --folder")
    if shutil.which("flower-superlink", path=str(Path(sys.executable).parent)) is None:
        parser.error("flower-superlink is not installed beside this Python: pip install 'gradalign[flower]'")
    arguments.folder.mkdir(parents=True)
    with Deployment(arguments.folder) as deployment:
        print(f"SuperLink on 127.0.0.1:{deployment.port}, logs in {deployment.folder}", flush=True)
        if arguments.intruder:
            deployment.start_node(deployment.count, enrol=False)
        run = deployment.run(arguments.app.resolve(), **{"num-server-rounds": arguments.rounds})
        shown = 0
        while True:
            ended = run.poll() is not None
            text = deployment.log("run")
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if ended:
                break
            time.sleep(0.5)
        if arguments.intruder:
            print(f"\nthe intruder's log:\n{deployment.log(f'node{deployment.count}')}")
        finished = arguments.app != HERE or (deployment.folder / "run" / "summary.json").exists()
    sys.exit(0 if finished and run.returncode == 0 else 1)


if __name__ == "__main__":
    main()
