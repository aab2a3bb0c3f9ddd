"""The config with which a standby leads the run that it copied."""

import json
from pathlib import Path
from typing import Any

from primerl.crypto.keys import SecretKey
from primerl.node.app.standby import COPY, OWN_CONFIG, StandbyNode
from primerl.node.config.loader import load
from primerl.node.config.run import JoinConfig, RunConfig
from primerl.node.storage.run_files import CONFIG


def test_what_differs_on_a_standbys_machine_goes_before_what_its_trainer_had(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here.toml"
    here.write_text('[training]\ndevice = "cpu"\n[network]\nport = 4500\n')
    trainers: dict[str, Any] = {
        "name": "demo",
        "output_dir": "/where/the/trainer/was",
        "training": {"device": "cuda", "lr": 1e-5},
        "network": {"host": "192.0.2.7", "port": 4433},
    }
    own: dict[str, Any] = {
        "name": COPY,
        "output_dir": str(tmp_path),
        "network": {"host": "0.0.0.0", "port": 0},
    }
    (tmp_path / COPY).mkdir()
    (tmp_path / COPY / CONFIG).write_text(json.dumps(trainers))
    (tmp_path / OWN_CONFIG).write_text(json.dumps(own))
    config = JoinConfig(role="standby", ticket="t", takeover_config=here)
    node = StandbyNode(config, SecretKey.generate(), tmp_path)
    leads = load(RunConfig, node.lead_arguments(), {})
    assert leads.run_dir == tmp_path / COPY
    assert leads.resume is not None
    assert (leads.training.device, leads.training.lr) == ("cpu", 1e-5)
    assert (leads.network.host, leads.network.port) == ("0.0.0.0", 4500)
