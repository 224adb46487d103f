"""The image, the compose file and the dashboard: that they are well-formed, and fit the server and each other.

`./test long container` runs the server in the file system of the image.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import dovetail
from dockerfile import DOCKERFILE, stages
from harness import ROOT, Server, binary

# An archive made by ./bundle has tests/python, and neither the image nor the library.
yaml = pytest.importorskip("yaml")

DOCKER = ROOT / "docker"
PAGE = ROOT / "docs" / "container.md"

pytestmark = pytest.mark.skipif(not DOCKER.exists(), reason="this is no clone of the repository")


def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def help_of_serve() -> str:
    return subprocess.run([binary(), "serve", "--help"], check=True, capture_output=True, text=True).stdout


def test_the_dockerfile_has_no_lint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_no_root_with_one_volume_and_settings_that_exist() -> None:
    build, image = stages()
    assert build.base.startswith("rust:") and re.fullmatch(r"debian:\w+-slim", image.base)
    # The oldest compiler that the crate builds with is the one that the image is built with.
    [rust] = re.findall(r'^rust-version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert build.base.split(":")[1].split("-")[0] == rust
    assert image.one("USER") == "10001:10001" and image.one("STOPSIGNAL") == "SIGTERM"
    assert image.all("VOLUME") == [image.environment()["XDG_CACHE_HOME"]]
    assert f"--owner=10001 --group=10001 {image.one('VOLUME')}" in image.one("RUN")
    assert (image.one("ENTRYPOINT"), image.one("CMD")) == ('["dovetail"]', '["serve"]')
    text = help_of_serve()
    for variable in image.environment():
        if variable.startswith("DOVETAIL_"):
            assert f"{variable}=" in text, f"the server has no setting {variable}"
    # What the build copies and reads is there, and not left out of the context.
    ignored = (ROOT / ".dockerignore").read_text().split()
    for path in [
        "Cargo.toml",
        "Cargo.lock",
        "build.rs",
        "src",
        "proto",
        "kernels",
        "benches/Cargo.toml",
        "clients/rust",
    ]:
        assert (ROOT / path).exists() and path not in ignored


def test_the_compose_file_has_profiles_secrets_and_files_that_are_there() -> None:
    services = compose()["services"]
    assert {profile for service in services.values() for profile in service["profiles"]} == {"cpu", "gpus"}
    text = help_of_serve()
    for name in ("dovetail-cpu", "dovetail-gpus"):
        service = services[name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and "privileged" not in service
        for variable in service["environment"]:
            assert f"{variable}=" in text, f"the server has no setting {variable}"
        # A file of the environment is a secret that the service has.
        files = [str(value) for value in service["environment"].values() if str(value).startswith("/run/secrets/")]
        assert sorted(files) == [f"/run/secrets/{secret}" for secret in sorted(service["secrets"])]
        [drain] = re.findall(r"--drain-seconds.*?\[default: (\d+)\]", text, re.DOTALL)
        assert int(service["stop_grace_period"].removesuffix("s")) > int(drain)
        # Only this host reaches it.
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    # A container with GPUs has a directory for host memory, which is a volume.
    gpus = services["dovetail-gpus"]
    assert any(volume.endswith(f":{gpus['environment']['DOVETAIL_ARENA_DIRECTORY']}") for volume in gpus["volumes"])
    [devices] = gpus["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = (DOCKER / source).exists() if source.startswith(".") else source in compose()["volumes"]
            assert known, f"{volume} is not there"
    # Prometheus asks for the admin port by a name that both servers have.
    [job] = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    for name in ("dovetail-cpu", "dovetail-gpus"):
        assert host in services[name]["networks"]["default"]["aliases"]
        assert services[name]["environment"]["DOVETAIL_ADMIN_LISTEN"].endswith(f":{port}")


def test_the_dashboard_is_provisioned_and_asks_for_metrics_that_the_server_has(
    server: Server, client: dovetail.Client
) -> None:
    grafana = DOCKER / "grafana"
    [source] = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((grafana / "provisioning/dashboards/dovetail.yaml").read_text())["providers"]
    dashboard = json.loads((grafana / "dashboards/dovetail.json").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose()["services"]["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    assert source["url"].startswith("http://prometheus:") and "prometheus" in compose()["services"]

    # A counter with labels is there once it has counted: a call that fails, a join, a connection that is refused.
    client.put("dashboard", pa.table({"k": [1, 2]}))
    assert client.join("dashboard", "dashboard", on="k").table().num_rows == 2
    with pytest.raises(dovetail.NotFound):
        client.get("no_such_table")
    client.drop("dashboard")
    exported = {name.split("{")[0]: name for name in server.metrics()}
    labels = set(re.findall(r'[{,](\w+)="', " ".join(server.metrics())))
    # The servers of the tests know no tenants, and have closed no connection.
    absent = {"dovetail_tenant_bytes": {"tenant"}, "dovetail_connections_closed_total": {"reason"}}
    queries = [(panel, target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for panel, query in queries:
        assert panel["datasource"]["uid"] == source["uid"]
        names = set(re.findall(r"\bdovetail_\w+", query))
        assert names, query
        for name in names - set(absent):
            assert name in exported, f"{panel['title']}: the server has no metric {name}"
        by = {word for group in re.findall(r"by \(([^)]*)\)", query) for word in re.split(r",\s*", group)}
        by |= set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"(\w+)!=\"", query))
        known = labels | {"le"} | {label for name in names for label in absent.get(name, ())}
        assert by <= known, f"{panel['title']}: no metric has the labels {by - known}"
    # Those that are not there yet have names and labels of the source.
    source_text = (ROOT / "src/service/metrics.rs").read_text()
    for name, of in absent.items():
        declared = re.search(rf'"{name}",.*?&\[(.*?)\]', source_text, re.DOTALL)
        assert declared and set(re.findall(r'"(\w+)"', declared[1])) == of, name


def test_the_page_of_the_image_gives_settings_that_exist() -> None:
    text = help_of_serve()
    page = PAGE.read_text()
    for variable in re.findall(r"-e (DOVETAIL_\w+)=", page):
        assert f"{variable}=" in text, f"the server has no setting {variable}"
    # The compose file has those of its command line.
    [names] = re.findall(r"^(DOVETAIL_\w+)=\S+ (DOVETAIL_\w+)=\S+ docker compose", page, re.MULTILINE)
    assert all(f"${{{name}:-" in (DOCKER / "compose.yaml").read_text() for name in names)


def test_the_secrets_are_made_once_and_let_a_client_in(tmp_path: Path) -> None:
    folder = tmp_path / "docker"
    folder.mkdir()
    shutil.copy(DOCKER / "secrets", folder / "secrets")

    def make() -> None:
        subprocess.run([folder / "secrets", "db.example.org", "10.0.0.7"], check=True, capture_output=True)

    make()
    # A client's user reads the certificate, whichever user made it.
    assert (folder / "secrets.d/tls.crt").stat().st_mode & 0o777 == 0o644
    made = {path.name: path.read_bytes() for path in (folder / "secrets.d").iterdir()}
    assert set(made) == {"token", "tokens", "tls.crt", "tls.key"}
    make()
    assert made == {path.name: path.read_bytes() for path in (folder / "secrets.d").iterdir()}
    secrets = {name: str(folder / "secrets.d" / name) for name in made}
    server = Server(
        tmp_path / "server",
        devices="host:1",
        host_memory="256MiB",
        token_file=secrets["tokens"],
        tls_cert=secrets["tls.crt"],
        tls_key=secrets["tls.key"],
        admin_listen="0.0.0.0:0",
    )
    options = {"token": made["token"].decode().strip(), "tls_root_certs": made["tls.crt"]}
    with server, server.connect(**options) as client:
        assert client.server_info()["devices"]
        # The command line of docs/container.md, at the port that this server has.
        [line] = re.findall(r"^dovetail (tables --server \S+ --ca \S+ --token \S+)$", PAGE.read_text(), re.MULTILINE)
        words = line.replace("localhost:8815", f"localhost:{server.address.split(':')[1]}").split()
        subprocess.run([binary(), *words], cwd=tmp_path, check=True, capture_output=True)
    names = subprocess.run(
        ["openssl", "x509", "-in", secrets["tls.crt"], "-noout", "-ext", "subjectAltName"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "DNS:db.example.org" in names and "IP Address:10.0.0.7" in names
