"""Prints a CycloneDX 1.5 SBOM of the binary: what it links, not what tests use. Arguments are handed to cargo (features, target)."""

import datetime
import json
import os
import re
import subprocess
import sys
import urllib.parse


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(metadata):
    """The packages that are built for the binary. `cargo metadata` alone would count the features that only tests ask for."""
    tree = cargo("tree", "--locked", "--edges", "normal,build", "--prefix", "none", "--format", "{p}", *sys.argv[1:])
    wanted = {tuple(line.split()[:2]) for line in tree.splitlines() if line}
    return {one["id"] for one in metadata["packages"] if (one["name"], f"v{one['version']}") in wanted}


def reference(package):
    return f"pkg:cargo/{package['name']}@{urllib.parse.quote(package['version'], safe='.-')}"


def component(package, checksums):
    entry = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "purl": reference(package),
    }
    if package.get("license"):
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def read_checksums():
    """From Cargo.lock, without tomllib, which Python has only since 3.11."""
    with open("Cargo.lock", encoding="utf-8") as file:
        tables = file.read().split("[[package]]")[1:]
    packages = [dict(re.findall(r'^(name|version|checksum) = "(.*)"$', table, re.MULTILINE)) for table in tables]
    return {(one["name"], one["version"]): one.get("checksum") for one in packages}


def main():
    # what other platforms need is not fetched for this
    platform = ["--filter-platform", sys.argv[sys.argv.index("--target") + 1]] if "--target" in sys.argv else []
    metadata = json.loads(cargo("metadata", "--all-features", "--format-version", "1", "--locked", *platform))
    packages = {package["id"]: package for package in metadata["packages"]}
    root = metadata["resolve"]["root"]
    found = linked(metadata)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    checksums = read_checksums()
    when = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.timezone.utc)
    others = sorted(found - {root}, key=lambda package: reference(packages[package]))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**component(packages[root], {}), "type": "application"},
        },
        "components": [component(packages[package], checksums) for package in others],
        "dependencies": [
            {
                "ref": reference(packages[package]),
                "dependsOn": sorted(reference(packages[needed]) for needed in nodes[package]["dependencies"] if needed in found),
            }
            for package in [root, *others]
        ],
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
