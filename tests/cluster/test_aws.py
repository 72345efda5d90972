"""deploy/aws.yaml and cluster.yaml on a server that answers like AWS: what would be started, and who reaches it."""

import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from ray.autoscaler._private.providers import _NODE_PROVIDERS, _get_node_provider
from ray.autoscaler._private.util import prepare_config, validate_config

from declutr.common.stores.folder import Folder

ROOT = Path(__file__).resolve().parents[2]
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
moto = pytest.importorskip("moto.server", reason="moto is not installed")


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    """An account of AWS on this machine. One for all tests: Ray keeps its connections."""
    tmp_path = tmp_path_factory.mktemp("home")
    monkeypatch = pytest.MonkeyPatch()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray puts the key it makes there
    (tmp_path / ".ssh").mkdir()
    yield
    monkeypatch.undo()
    server.stop()


def create_stack(you="203.0.113.7/32"):
    ec2 = boto3.client("ec2")
    given = {"Vpc": ec2.describe_vpcs()["Vpcs"][0]["VpcId"], "You": you}
    formation = boto3.client("cloudformation")
    formation.create_stack(
        StackName="declutr",
        TemplateBody=(ROOT / "deploy" / "aws.yaml").read_text(),
        Capabilities=["CAPABILITY_NAMED_IAM"],
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
    )
    stack = formation.describe_stacks(StackName="declutr")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}


def filled_in(outputs):
    """cluster.yaml as docs/guides/cluster.md says to fill it in."""
    text = (ROOT / "cluster.yaml").read_text()
    assert text.count("sg-00000000000000000") == 1
    return yaml.safe_load(text.replace("sg-00000000000000000", outputs["SecurityGroup"]))


def bootstrap(cluster):
    """What `ray up` does with the file before it starts anything."""
    config = prepare_config(cluster)
    validate_config(config)
    return _NODE_PROVIDERS["aws"](config["provider"]).bootstrap_config(config)


def rights_of(profile):
    """What the instances of a profile may do, and with what."""
    iam, found = boto3.client("iam"), {}
    for role in iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]:
        for policy in iam.list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]:
            version = iam.get_policy_version(PolicyArn=policy["PolicyArn"], VersionId="v1")["PolicyVersion"]
            for statement in version["Document"]["Statement"]:
                found |= dict.fromkeys(statement["Action"], statement["Resource"])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_cluster_file_that_was_not_filled_in_starts_nothing(capsys):
    unfilled = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    with pytest.raises((AssertionError, click.ClickException)):
        bootstrap(unfilled)
    assert "Failed to detect a security group" in capsys.readouterr().err
    assert boto3.client("ec2").describe_instances()["Reservations"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_aws_template_starts_and_exposes_what_is_documented():
    outputs = create_stack()
    config = bootstrap(filled_in(outputs))
    provider = _get_node_provider(config["provider"], config["cluster_name"])
    for name in ("head", "gpu_worker"):
        kind = "head" if name == "head" else "worker"
        tags = {"ray-node-type": kind, "ray-user-node-type": name, "ray-node-name": f"ray-declutr-{kind}"}
        provider.create_node(dict(config["available_node_types"][name]["node_config"]), tags, 1)

    ec2 = boto3.client("ec2")
    found = [each for held in ec2.describe_instances()["Reservations"] for each in held["Instances"]]
    started = {instance["InstanceType"]: instance for instance in found}
    head, worker = started["m7i.2xlarge"], started["g6.12xlarge"]
    assert "InstanceLifecycle" not in head
    assert worker["InstanceLifecycle"] == "spot"
    assert head["IamInstanceProfile"]["Arn"].endswith("/declutr-head")
    assert worker["IamInstanceProfile"]["Arn"].endswith("/declutr-worker")
    assert {instance["Placement"]["AvailabilityZone"] for instance in (head, worker)} == {"us-west-2a"}
    for instance in (head, worker):
        assert [group["GroupId"] for group in instance["SecurityGroups"]] == [outputs["SecurityGroup"]]
        assert instance["MetadataOptions"]["HttpTokens"] == "required"

    # Ray made no group of its own (that one would admit SSH from everywhere), and changed nothing in ours.
    groups = {group["GroupId"]: group for group in ec2.describe_security_groups()["SecurityGroups"]}
    assert not [group["GroupName"] for group in groups.values() if "ray" in group["GroupName"]]
    rules = groups[outputs["SecurityGroup"]]["IpPermissions"]
    assert [[block["CidrIp"] for block in rule["IpRanges"]] for rule in rules if rule.get("FromPort") == 22] == [
        ["203.0.113.7/32"]
    ]
    inside = [rule for rule in rules if rule["IpProtocol"] == "-1"]
    assert [pair["GroupId"] for rule in inside for pair in rule["UserIdGroupPairs"]] == [outputs["SecurityGroup"]]
    assert len(rules) == 2
    assert not [rule for rule in inside if rule["IpRanges"] or rule["Ipv6Ranges"]]

    # The bucket is a place for a run, and the rights of a worker are to it alone.
    bucket = f"arn:aws:s3:::{outputs['Bucket']}"
    in_bucket = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
    of_a_worker = {"s3:ListBucket": bucket} | dict.fromkeys(in_bucket, f"{bucket}/*")
    assert rights_of("declutr-worker") == of_a_worker
    of_the_head = rights_of("declutr-head")
    assert of_a_worker.items() <= of_the_head.items()
    assert "WorkerRole" in of_the_head["iam:PassRole"]
    assert "iam:CreateServiceLinkedRole" not in of_the_head, "a person does it once"
    assert set(outputs) == {"SecurityGroup", "Bucket"}
    run = f"s3://{outputs['Bucket']}/runs/base"
    Folder(run).put("note", b"found without a key in the address")
    assert Folder(run).names() == ["note"]


@pytest.mark.slow
def test_template_is_what_cloudformation_takes():
    pytest.importorskip("cfnlint", reason="cfn-lint is not installed")
    lint = [sys.executable, "-c", "from cfnlint.runner import main; main()", str(ROOT / "deploy" / "aws.yaml")]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
