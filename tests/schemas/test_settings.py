"""Settings: file under environment under flags, and every mistake told with its key, its value and what to do."""

import json
from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.settings import Settings, masked_settings, require_addresses, without_credentials
from schemas.settings_reader import load_settings


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "pagemill.toml"


def refusal(file: Path | None = None, environment: dict[str, str] | None = None, **overrides: str) -> str:
    flags = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(SettingsError) as caught:
        load_settings(file, flags, environment or {})
    return str(caught.value)


def test_flags_are_stronger_than_the_environment_and_that_than_the_file(toml: Path) -> None:
    toml.write_text('[kafka]\ngroup = "file"\nclient_id = "file"\ntopics = ["file"]\n')
    environment = {"PAGEMILL_KAFKA__CLIENT_ID": "environment", "PAGEMILL_KAFKA__TOPICS": "environment"}
    kafka = load_settings(toml, {"kafka.topics": "flag"}, environment).kafka
    assert (kafka.group, kafka.client_id, kafka.topics) == ("file", "environment", ("flag",))


def test_without_anything_the_defaults_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {}, {})
    assert settings.kafka.topics == ("pagemill.documents",)
    assert settings.tasks == {}


def test_pagemill_toml_of_the_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pagemill.toml").write_text('[kafka]\ngroup = "here"\n')
    monkeypatch.chdir(tmp_path)
    assert load_settings(None, {}, {}).kafka.group == "here"


@pytest.mark.parametrize("text", ["a,b", " a , b ,", '["a", "b"]'])
def test_a_list_is_read_from_commas_or_json(text: str) -> None:
    assert load_settings(None, {}, {"PAGEMILL_KAFKA__TOPICS": text}).kafka.topics == ("a", "b")


def test_numbers_and_booleans_are_read_from_text() -> None:
    environment = {"PAGEMILL_ENGINE__PREFIX_CACHING": "false", "PAGEMILL_ENGINE__MAX_RUNNING": "7"}
    engine = load_settings(None, {"model.max_model_len": "99"}, environment).engine
    assert (engine.prefix_caching, engine.max_running) == (False, 7)


def test_a_task_can_be_given_in_the_environment_and_by_flags(toml: Path) -> None:
    toml.write_text('[tasks.Mood]\nkind = "classify"\nlabels = ["a", "b"]\n[tasks."v1.2"]\n')
    settings = load_settings(
        toml,
        {"tasks.v1.2.sampling.max_tokens": "3"},
        {"PAGEMILL_TASKS__MOOD__LABELS": "good,bad", "PAGEMILL_TASKS__NEW__TEMPLATE": "{{ text }}"},
    )
    assert sorted(settings.tasks) == ["Mood", "new", "v1.2"]
    assert settings.tasks["Mood"].labels == ("good", "bad")
    assert settings.tasks["v1.2"].sampling.max_tokens == 3
    assert settings.tasks["new"].template == "{{ text }}"


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(toml: Path) -> None:
    toml.write_text('[kafka]\ntopcs = ["a"]\n')
    assert refusal(toml) == f"unknown setting kafka.topcs ({toml}); did you mean kafka.topics?"


def test_a_key_in_the_wrong_section_is_told_where_it_belongs(toml: Path) -> None:
    toml.write_text("[engine]\nmax_model_len = 4096\n")
    assert "did you mean model.max_model_len?" in refusal(toml)


def test_an_unknown_key_inside_a_task_is_refused(toml: Path) -> None:
    toml.write_text("[tasks.a.sampling]\nmax_token = 4\n")
    assert "did you mean tasks.a.sampling.max_tokens?" in refusal(toml)


def test_an_unknown_name_in_the_environment_is_refused() -> None:
    sentence = refusal(environment={"PAGEMILL_KAFKA__GRUOP": "x"})
    assert sentence == "unknown setting kafka.gruop (environment PAGEMILL_KAFKA__GRUOP); did you mean kafka.group?"


def test_a_single_underscore_in_the_environment_is_told() -> None:
    assert refusal(environment={"PAGEMILL_KAFKA_TOPICS": "x"}).endswith("did you mean PAGEMILL_KAFKA__TOPICS?")
    assert "PAGEMILL_KAFKA__TOPICS" in refusal(environment={"PAGEMILL_TOPIC": "x"})


def test_names_that_kubernetes_or_the_cache_give_are_none_of_ours() -> None:
    environment = {
        "PAGEMILL_CACHE": "/somewhere",
        "PAGEMILL_SERVICE_HOST": "10.0.0.1",
        "PAGEMILL_PORT": "tcp://10.0.0.1:9464",
        "PAGEMILL_PORT_9464_TCP_ADDR": "10.0.0.1",
        "PAGEMILL_KAFKA_SERVICE_PORT": "9092",
        "OTHER": "x",
    }
    assert load_settings(None, {}, environment).kafka.group == "pagemill"


@pytest.mark.parametrize(
    ("text", "key", "variable"),
    [
        ('[kafka]\nsasl_password = "x"', "kafka.sasl_password", "PAGEMILL_KAFKA__SASL_PASSWORD"),
        ('[elasticsearch]\napi_key = "x"', "elasticsearch.api_key", "PAGEMILL_ELASTICSEARCH__API_KEY"),
        ('[elasticsearch]\npassword = "x"', "elasticsearch.password", "PAGEMILL_ELASTICSEARCH__PASSWORD"),
    ],
)
def test_a_secret_in_the_file_is_refused_and_its_value_not_repeated(
    toml: Path, text: str, key: str, variable: str
) -> None:
    toml.write_text(text)
    assert refusal(toml) == (
        f"{key} is a secret and stands in {str(toml)!r}; secrets are not written there: give {key}_file, or {variable} "
        "in the environment"
    )


WITH_CREDENTIALS = [
    "http://me:hush@search:9200",
    "https://hush@search:9200",
    "http://me:hush#hush@search:9200",
    "http://me:hush/hush@search:9200",
    "http://me:hush?hush@search:9200",
    "http://me:hush@hush@search:9200",
    "http://me:hush://hush@search:9200",
    "http://me:hush [hush\n@search:9200",
    "me:hush@search:9200",
    "me:hush://hush@search:9200",
]


@pytest.mark.parametrize("address", WITH_CREDENTIALS)
def test_whatever_stands_before_the_last_at_of_an_address_is_not_shown(address: str) -> None:
    scheme = f"{address.partition('://')[0]}://" if address.startswith("http") else ""
    assert without_credentials(address) == f"{scheme}***@search:9200"
    settings = Settings.model_validate(
        {"kafka": {"bootstrap_servers": [address]}, "elasticsearch": {"urls": [address]}}
    )
    assert "hush" not in json.dumps(masked_settings(settings))


def test_an_address_without_credentials_is_shown_as_it_is() -> None:
    for address in ("https://search:9200", "search", "[::1]:9092", ""):
        assert without_credentials(address) == address


@pytest.mark.parametrize("address", WITH_CREDENTIALS)
def test_credentials_in_an_address_are_refused_wherever_it_is_given(toml: Path, address: str) -> None:
    said = f"holds credentials in {without_credentials(address)!r}; give them as"
    toml.write_text(f"[elasticsearch]\nurls = [{json.dumps(address)}]\n")
    instead = "elasticsearch.username and password_file, or as api_key_file"
    assert refusal(toml) == f"elasticsearch.urls ({toml}) {said} {instead}"
    listed = json.dumps([address])
    assert refusal(None, {}, elasticsearch__urls=listed) == f"elasticsearch.urls (flag) {said} {instead}"
    variable = "PAGEMILL_KAFKA__BOOTSTRAP_SERVERS"
    assert refusal(environment={variable: listed}) == (
        f"kafka.bootstrap_servers (environment {variable}) {said} kafka.sasl_username and sasl_password_file"
    )


def test_a_password_with_a_comma_in_it_is_refused_and_no_half_of_it_shown() -> None:
    said = refusal(None, {}, elasticsearch__urls="http://me:hush,hush@search:9200")
    assert said.startswith("elasticsearch.urls (flag) holds credentials in '***@search:9200'; ")


def test_credentials_in_the_file_are_refused_although_the_environment_gives_other_addresses(toml: Path) -> None:
    toml.write_text('[elasticsearch]\nurls = ["https://me:hush@search:9200"]\n')
    said = refusal(toml, {"PAGEMILL_ELASTICSEARCH__URLS": "https://search:9200"})
    assert "holds credentials in 'https://***@search:9200'" in said


@pytest.mark.parametrize("address", WITH_CREDENTIALS)
def test_an_address_that_is_no_list_is_quoted_without_its_credentials(toml: Path, address: str) -> None:
    for given in (json.dumps(address), f"[[{json.dumps(address)}]]", f"[{{a = {json.dumps(address)}}}]"):
        toml.write_text(f"[elasticsearch]\nurls = {given}\n")
        assert "hush" not in refusal(toml)
    assert "hush" not in refusal(environment={"PAGEMILL_ELASTICSEARCH__URLS": f'["{address}"'})


def test_a_section_that_is_none_is_not_quoted(toml: Path) -> None:
    toml.write_text('[[elasticsearch]]\npassword = "hush"\n')
    assert refusal(toml) == f"elasticsearch is of type list ({toml}): expected a table of settings"


def test_a_secret_from_the_environment_is_masked_where_settings_are_shown() -> None:
    settings = load_settings(None, {}, {"PAGEMILL_KAFKA__SASL_PASSWORD": "hush"})
    assert settings.kafka.sasl_password is not None
    assert settings.kafka.sasl_password.get_secret_value() == "hush"
    assert "hush" not in str(masked_settings(settings))
    assert "hush" not in repr(settings)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PAGEMILL_ELASTICSEARCH", '{"password": ["hush"]}'),
        ("PAGEMILL_ELASTICSEARCH", '{"password": "hush"'),
        ("PAGEMILL_ELASTICSEARCH__URLS", '["http://me:hush@search:9200"'),
    ],
)
def test_a_mistake_beside_a_secret_is_told_without_it(variable: str, value: str) -> None:
    said = refusal(environment={variable: value})
    assert "elasticsearch" in said
    assert "hush" not in said


def test_a_key_below_a_secret_is_refused_without_it() -> None:
    said = refusal(
        environment={"PAGEMILL_ELASTICSEARCH__PASSWORD": "hush", "PAGEMILL_ELASTICSEARCH__PASSWORD__OLD": "x"}
    )
    assert "elasticsearch.password" in said
    assert "hush" not in said


def test_one_address_in_place_of_a_list_is_told_as_such_and_without_its_password(toml: Path) -> None:
    toml.write_text('[elasticsearch]\nurls = "http://me:hush@search:9200"\n')
    assert refusal(toml) == (
        f'elasticsearch.urls is \'http://***@search:9200\' ({toml}): expected a list, such as ["a", "b"]'
    )


def test_no_topic_at_all_is_refused() -> None:
    assert refusal(kafka__topics="") == "kafka.topics is [] (flag): expected a list of one at the least"


def test_dead_letters_that_would_be_read_again_are_refused() -> None:
    said = refusal(kafka__topics="a,b", kafka__dead_letter_topic="b")
    assert said.startswith("kafka (flag): dead_letter_topic 'b' is one of the topics that are read: ")


def test_a_value_out_of_range_is_told_with_its_key_its_value_and_where_it_stands(toml: Path) -> None:
    toml.write_text("[kafka]\nmax_in_flight_documents = 0\n")
    assert refusal(toml) == (f"kafka.max_in_flight_documents is 0 ({toml}): input should be greater than or equal to 1")
    assert refusal(None, {}, engine__block_size="7") == "engine (flag): block_size is 7; expected 8 to 256"


def test_every_mistake_is_told_at_once(toml: Path) -> None:
    toml.write_text("[kafka]\nmax_in_flight_documents = 0\nmax_in_flight_bytes = 0\n")
    assert len(refusal(toml).splitlines()) == 2


@pytest.mark.parametrize("name", ["a:b", "x" * 65, "with space"])
def test_a_task_name_that_a_row_could_not_hold_is_refused(toml: Path, name: str) -> None:
    toml.write_text(f'[tasks."{name}"]\ntemplate = "x"\n')
    assert refusal(toml) == f"task name {name!r}: 1 to 64 of letters, digits, '.', '_' and '-' are allowed"


def test_a_task_that_contradicts_itself_is_refused(toml: Path) -> None:
    toml.write_text('[tasks.a]\nkind = "classify"\nlabels = ["one"]\n')
    assert refusal(toml) == f"tasks.a ({toml}): a classify task needs at least two labels, not ['one']"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, toml: Path) -> None:
    assert refusal(tmp_path / "absent.toml") == f"settings file {str(tmp_path / 'absent.toml')!r} does not exist"
    toml.write_text("[kafka\n")
    assert refusal(toml).startswith(f"settings file {str(toml)!r} is not TOML: ")


def test_a_worker_without_addresses_is_told_every_setting_that_it_needs() -> None:
    with pytest.raises(SettingsError) as caught:
        require_addresses(load_settings(None, {"kafka.bootstrap_servers": "a:1"}, {}))
    assert "kafka.bootstrap_servers = " not in str(caught.value)
    assert "elasticsearch.urls" in str(caught.value)
    assert "model.path" in str(caught.value)
