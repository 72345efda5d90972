"""deploy/aws.yaml and cluster.yaml on a server that answers like AWS: what would be started, and who reaches it."""

import logging
import os
import subprocess
import sys
from unittest.mock import patch

import click
import pytest
import yaml
from processes import ROOT
from ray.autoscaler._private.providers import _NODE_PROVIDERS, _get_node_provider
from ray.autoscaler._private.util import prepare_config, validate_config

from declutr.common.stores.folder import Folder

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
moto = pytest.importorskip("moto.server", reason="moto is not installed")


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    """An account of AWS on this machine. One for all tests: Ray keeps its connections."""
    tmp_path = tmp_path_factory.mktemp("home")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-west-2"}
    variables |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "HOME": str(tmp_path)}  # for the key that Ray makes
    (tmp_path / ".ssh").mkdir()
    with patch.dict(os.environ, variables):
        yield
    server.stop()


def create_stack():
    values = {"Vpc": boto3.client("ec2").describe_vpcs()["Vpcs"][0]["VpcId"], "You": "203.0.113.7/32"}
    parameters = [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()]
    options = {"Capabilities": ["CAPABILITY_NAMED_IAM"], "Parameters": parameters}
    formation, body = boto3.client("cloudformation"), (ROOT / "deploy" / "aws.yaml").read_text()
    formation.create_stack(StackName="declutr", TemplateBody=body, **options)
    stack = formation.describe_stacks(StackName="declutr")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}


def bootstrap(cluster):
    """What `ray up` does with the file before it starts anything."""
    config = prepare_config(cluster)
    validate_config(config)
    return _NODE_PROVIDERS["aws"](config["provider"]).bootstrap_config(config)


def rights_of(profile):
    """What the instances of a profile may do, and with what."""
    iam, rights = boto3.client("iam"), {}
    for role in iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]:
        for policy in iam.list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]:
            version = iam.get_policy_version(PolicyArn=policy["PolicyArn"], VersionId="v1")["PolicyVersion"]
            for statement in version["Document"]["Statement"]:
                rights |= dict.fromkeys(statement["Action"], statement["Resource"])
    return rights


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_aws_template_starts_and_exposes_what_is_documented_and_nothing_before_it_is_filled_in(capsys):
    unfilled = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    with pytest.raises((AssertionError, click.ClickException)):
        bootstrap(unfilled)
    assert "Failed to detect a security group" in capsys.readouterr().err
    assert boto3.client("ec2").describe_instances()["Reservations"] == []
    outputs, text = create_stack(), (ROOT / "cluster.yaml").read_text()
    assert text.count("sg-00000000000000000") == 1, "docs/guides/cluster.md says to fill it in"
    config = bootstrap(yaml.safe_load(text.replace("sg-00000000000000000", outputs["SecurityGroup"])))
    provider = _get_node_provider(config["provider"], config["cluster_name"])
    for name in ("head", "gpu_worker"):
        kind = "head" if name == "head" else "worker"
        tags = {"ray-node-type": kind, "ray-user-node-type": name, "ray-node-name": f"ray-declutr-{kind}"}
        provider.create_node(dict(config["available_node_types"][name]["node_config"]), tags, 1)

    ec2 = boto3.client("ec2")
    instances = [item for reservation in ec2.describe_instances()["Reservations"] for item in reservation["Instances"]]
    started = {instance["InstanceType"]: instance for instance in instances}
    for kind, lifecycle, profile in (("m7i.2xlarge", None, "head"), ("g6.12xlarge", "spot", "worker")):
        instance = started[kind]
        assert instance.get("InstanceLifecycle") == lifecycle
        assert instance["Placement"]["AvailabilityZone"] == "us-west-2a"
        assert instance["IamInstanceProfile"]["Arn"].endswith(f"/declutr-{profile}")
        assert [group["GroupId"] for group in instance["SecurityGroups"]] == [outputs["SecurityGroup"]]
        assert instance["MetadataOptions"]["HttpTokens"] == "required"

    # Ray made no group of its own (that one would admit SSH from everywhere), and changed nothing in ours.
    groups = {group["GroupId"]: group for group in ec2.describe_security_groups()["SecurityGroups"]}
    assert not [group["GroupName"] for group in groups.values() if "ray" in group["GroupName"]]
    inside, ssh = sorted(groups[outputs["SecurityGroup"]]["IpPermissions"], key=lambda rule: rule["IpProtocol"])
    assert (ssh["FromPort"], [block["CidrIp"] for block in ssh["IpRanges"]]) == (22, ["203.0.113.7/32"])
    assert [pair["GroupId"] for pair in inside["UserIdGroupPairs"]] == [outputs["SecurityGroup"]]
    assert (inside["IpProtocol"], inside["IpRanges"], inside["Ipv6Ranges"]) == ("-1", [], [])

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
    run = Folder(f"s3://{outputs['Bucket']}/runs/base")
    run.put("note", b"found without a key in the address")
    assert run.names() == ["note"]


@pytest.mark.slow
def test_template_is_what_cloudformation_takes():
    pytest.importorskip("cfnlint", reason="cfn-lint is not installed")
    lint = [sys.executable, "-c", "from cfnlint.runner import main; main()", str(ROOT / "deploy" / "aws.yaml")]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
