"""Have a served model write chats, which heads and draft models for it are trained on.

A drafter must guess what its target writes, so it learns from the target's own answers. The prompts
come from the templates below: questions in six languages, code, JSON, calls of tools, and chats of
several turns that ask to rewrite, summarise, translate and go on.

Usage: outrider serve MODEL, then write_chats.py OUT.jsonl --chats N [--url URL] [--at-once N]
A line of OUT is {"messages": [...], "temperature": ...}. Existing lines are kept and counted.
"""

import argparse
import asyncio
import json
import pathlib
import random
from collections.abc import Iterator

import httpx

TOPICS = (
    "the moon|rain|bread|honey bees|volcanoes|the heart|bicycles|glaciers|chess|tea|whales|"
    "vaccines|the printing press|jazz|rivers|photosynthesis|inflation|the Roman Empire|"
    "earthquakes|cats|magnets|the violin|coral reefs|solar panels|sleep|the Silk Road|penguins|"
    "batteries|tides|sourdough|dinosaurs|the telephone|gravity|forests|coffee|DNA|trains|"
    "the Olympic Games|clouds|friendship|a lighthouse|the desert|learning a language|"
    "a small garden|public libraries|salt|marathon training|the Eiffel Tower|black holes|paper|"
    "owls|democracy|antibiotics|mountains"
).split("|")
QUESTIONS = {
    "en": (
        "What is the most important thing to know about {}?|Explain {} to a ten-year-old.|"
        "Write a short story about {}.|Give me five facts about {}.|Why does {} matter?|"
        "Write a poem about {}.|How would you describe {} in one paragraph?|"
        "List the pros and cons of {}.|What do people often get wrong about {}?|"
        "Write an email to a friend about {}.|What is the history of {}?|"
        "Write a step-by-step guide for a beginner who is interested in {}."
    ),
    "de": (
        "Was ist das Wichtigste an „{}“?|Erkläre „{}“ in drei Sätzen.|"
        "Schreibe eine kurze Geschichte über „{}“.|Nenne fünf Tatsachen über „{}“."
    ),
    "fr": (
        "Qu'est-ce qui est le plus important à savoir sur « {} » ?|Expliquez « {} » simplement.|"
        "Écris une petite histoire sur « {} ».|Donne cinq faits sur « {} »."
    ),
    "es": (
        "¿Qué es lo más importante de «{}»?|Explica «{}» en tres frases.|"
        "Escribe un cuento corto sobre «{}».|Dame cinco datos sobre «{}»."
    ),
    "it": (
        "Qual è la cosa più importante da sapere su «{}»?|Spiega «{}» in tre frasi.|"
        "Scrivi una breve storia su «{}».|Dammi cinque fatti su «{}»."
    ),
    "pt": (
        "O que é mais importante saber sobre “{}”?|Explique “{}” em três frases.|"
        "Escreva uma pequena história sobre “{}”.|Diga cinco fatos sobre “{}”."
    ),
}
FOLLOW_UPS = (
    "Summarise that in one sentence.|Rewrite it for a child.|Make it shorter.|Now as a list.|"
    "Can you give an example?|Go on.|Translate your answer into French.|Rewrite it more formally.|"
    "What is the opposite view?|Repeat it, but correct any mistakes.|Turn it into a dialogue."
).split("|")
FUNCTIONS = (
    "reverses a string|returns the n-th Fibonacci number|counts the words in a text|sorts a list|"
    "checks whether a number is prime|merges two dictionaries|reads a CSV file|flattens a list|"
    "finds the largest element|removes duplicates|computes a factorial|parses a date|"
    "converts Celsius to Fahrenheit|computes the mean of numbers|checks for a palindrome|"
    "downloads a file|validates an e-mail address|binary searches a sorted list|rolls a die|"
    "groups people by age|implements a stack|writes a log line|retries a function three times"
).split("|")
LANGUAGES = "Python Python Python JavaScript TypeScript Java Go C Rust SQL Bash HTML".split()
NAMES = "Ada Ben Chen Dora Eli Fay Hana Ivo June Kofi Lena Milo Nora Omar Pia Rosa Sven".split()
CITIES = "Oslo Lima Cairo Quito Osaka Turin Perth Delhi Boston Lagos Porto Seoul Hanoi".split()
JOBS = "nurse pilot baker editor farmer lawyer plumber teacher welder chemist tailor".split()
TOOLS = (
    ("get_weather", "Get the weather of a city", {"city": "string", "unit": "string"}),
    ("search", "Search the web", {"query": "string", "count": "integer"}),
    ("send_email", "Send an email", {"to": "string", "subject": "string", "body": "string"}),
    ("add_event", "Add an event to the calendar", {"title": "string", "date": "string"}),
    ("convert", "Convert an amount of money", {"amount": "number", "from": "string"}),
)


def question(rng: random.Random, language: str) -> str:
    """Return a question about a topic."""
    return rng.choice(QUESTIONS[language].split("|")).format(rng.choice(TOPICS))


def code(rng: random.Random) -> str:
    """Return a request for code, or about code."""
    language, task = rng.choice(LANGUAGES), rng.choice(FUNCTIONS)
    form = rng.choice(
        (
            "Write a {0} function that {1}.",
            "Write {0} code that {1}, with comments.",
            "Show me how to write a {0} program that {1}, and explain each line.",
            "Write a {0} class whose method {1}, and unit tests for it.",
        )
    )
    return form.format(language, task)


def as_json(rng: random.Random) -> str:
    """Return a request for JSON."""
    if rng.random() < 0.5:
        name, job, city = rng.choice(NAMES), rng.choice(JOBS), rng.choice(CITIES)
        fields = ", ".join(rng.sample(["name", "age", "job", "city"], k=rng.randint(2, 4)))
        text = f"{name} is a {rng.randint(18, 80)} year old {job} from {city}."
        return f"Extract {fields} as JSON from this text: {text}"
    fields = ", ".join(rng.sample(["name", "year", "place", "size", "reason", "rating"], k=3))
    count, topic = rng.randint(2, 6), rng.choice(TOPICS)
    return f"Give me a JSON list of {count} objects about {topic}, each with {fields}."


def tool_chat(rng: random.Random) -> list[dict[str, str]]:
    """Return a system message that offers tools in Hermes' form, and a question that needs one."""
    tools = rng.sample(TOOLS, k=rng.randint(1, 3))
    lines = [
        json.dumps(
            {
                "name": name,
                "description": text,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in fields.items()},
                },
            }
        )
        for name, text, fields in tools
    ]
    system = (
        "You may call functions. Their signatures stand inside <tools></tools>.\n<tools>\n"
        + "\n".join(lines)
        + "\n</tools>\nAnswer with a call of a function: <tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    day = f"2026-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"
    asks = {
        "get_weather": f"What is the weather in {rng.choice(CITIES)}?",
        "search": f"Find {rng.randint(2, 9)} pages about {rng.choice(TOPICS)}.",
        "send_email": f"Tell {rng.choice(NAMES)} by email that I am late.",
        "add_event": f"Put dinner with {rng.choice(NAMES)} on {day}.",
        "convert": f"How much is {rng.randint(5, 900)} dollars in euros?",
    }
    user = asks[rng.choice(tools)[0]]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def opening(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages before a chat's first answer."""
    kind = rng.random()
    if kind < 0.1:
        return tool_chat(rng)
    if kind < 0.25:
        text = code(rng)
    elif kind < 0.37:
        text = as_json(rng)
    elif kind < 0.62:
        text = question(rng, rng.choice(["de", "fr", "es", "it", "pt"]))
    else:
        text = question(rng, "en")
    return [{"role": "user", "content": text}]


class Writer:
    """Continues chats with the answers of a gateway."""

    def __init__(self, client: httpx.AsyncClient, model: str, limit: int) -> None:
        self.client, self.model, self.limit = client, model, limit

    async def chat(self, rng: random.Random) -> dict[str, object]:
        """Return one chat of one to three answers; a quarter of the chats are greedy."""
        temperature = rng.choice([0.0, 0.4, 0.7, 0.7])
        messages = opening(rng)
        for turn in range(rng.choice([1, 1, 2, 3])):
            if turn:
                messages.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
            body = {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.limit,
                "temperature": temperature,
            }
            answer = await self.client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
            if choice["finish_reason"] == "length":
                break
        return {"messages": messages, "temperature": temperature}


async def write(arguments: argparse.Namespace) -> None:
    """Append chats to the file until it has as many as wanted."""
    out: pathlib.Path = arguments.out
    done = len(out.read_text().splitlines()) if out.exists() else 0
    numbers: Iterator[int] = iter(range(done, arguments.chats))
    async with httpx.AsyncClient(base_url=arguments.url, timeout=3600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        writer = Writer(client, model, arguments.limit)
        with out.open("a") as file:

            async def work() -> None:
                for number in numbers:
                    chat = await writer.chat(random.Random(f"chat {number}"))
                    file.write(json.dumps(chat, ensure_ascii=False) + "\n")
                    file.flush()

            await asyncio.gather(*(work() for _ in range(arguments.at_once)))


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description="Have a served model write chats.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--chats", type=int, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--limit", type=int, default=300, help="tokens of an answer")
    asyncio.run(write(parser.parse_args()))


if __name__ == "__main__":
    main()
