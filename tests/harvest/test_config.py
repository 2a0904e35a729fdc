"""The configuration: files load, mistakes are named, content and speed are kept apart."""

from pathlib import Path

import pytest

from harvest.config import load_config, parse_config
from harvest.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = {
    "model": {"name": "m"},
    "dataset": {"path": "d.jsonl"},
    "capture": {"locations": ["residual.1"]},
    "store": {"path": "out"},
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    load_config(path)


def test_unknown_keys_are_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r'unknown key "store.shard_byte"; did you mean "shard_bytes"'):
        parse_config({**MINIMAL, "store": {"path": "out", "shard_byte": 3}})
    with pytest.raises(ConfigError, match=r'unknown key "modle"; did you mean "model"'):
        parse_config({**MINIMAL, "modle": {}})
    with pytest.raises(ConfigError, match=r'unknown key "capture.rows.zzz"; known keys: every'):
        parse_config({**MINIMAL, "capture": {"locations": ["a"], "rows": {"zzz": 1}}})


def test_missing_sections_and_bad_values_are_named():
    with pytest.raises(ConfigError, match=r'"model" is required'):
        parse_config({})
    with pytest.raises(ConfigError, match="rows_per_shard must be a power of two, not 100"):
        parse_config({**MINIMAL, "store": {"path": "out", "rows_per_shard": 100}})
    with pytest.raises(ConfigError, match="max_tokens >= 2"):
        parse_config({**MINIMAL, "capture": {"locations": ["a"], "rows": {"source": "generated"}}})


@pytest.mark.parametrize("value", [0, 4.9, -1, True, "soon", float("inf"), float("nan"), [900]])
def test_a_stall_that_nobody_could_tell_is_refused(value):
    with pytest.raises(ConfigError, match='"limits.stall_s": stall_s must be a number .* at least 5, or "never", not'):
        parse_config({**MINIMAL, "limits": {"stall_s": value}})


@pytest.mark.parametrize(("value", "meant"), [(5, 5.0), (1e6, 1e6), ("never", "never"), (None, "never")])
def test_a_stall_may_take_its_time_or_for_ever(value, meant):
    config = parse_config({**MINIMAL, "limits": {"stall_s": value}})
    assert config.limits.stall_s == meant
    # As the run folder keeps it.
    assert parse_config(config.model_dump(mode="json", exclude_none=True)) == config
    assert config.content_hash() == parse_config(MINIMAL).content_hash()


def test_overrides_reach_nested_keys_and_unknown_ones_are_refused(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[model]\nname="m"\n[dataset]\npath="d"\n[capture]\nlocations=["a"]\n[store]\npath="o"\n')
    config = load_config(path, ["capture.generation.max_tokens=5", "model.name=other", "engine.vllm.max_num_seqs=7"])
    assert config.capture.generation.max_tokens == 5
    assert config.model.name == "other"
    assert config.engine.vllm == {"max_num_seqs": 7}
    assert load_config(path, ["limits.stall_s=never"]).limits.stall_s == "never"
    with pytest.raises(ConfigError, match="did you mean"):
        load_config(path, ["engine.cuont=5"])
    with pytest.raises(ConfigError, match="not of the form"):
        load_config(path, ["engine"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "absent.toml")
    path.write_text("[model")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path)


def test_speed_does_not_change_the_content_hash():
    base = parse_config(MINIMAL)
    faster = parse_config({**MINIMAL, "engine": {"count": 4}, "limits": {"attempts": 9}})
    moved = parse_config({**MINIMAL, "store": {"path": "elsewhere"}})
    other = parse_config({**MINIMAL, "seed": 1})
    assert base.content_hash() == faster.content_hash() == moved.content_hash() != other.content_hash()
