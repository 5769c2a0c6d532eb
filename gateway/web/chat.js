// A chat with history: the model answers each message with all earlier messages in view. The page
// computes the results of tool calls.

import { complete } from "./completion.js";
import { Output, figures } from "./output.js";
import { TOOLS, resultOf } from "./tools.js";

const MESSAGES = {
  question: { text: "What is the capital of France?", tools: "none" },
  "tool call": { text: "What is the weather in Oslo?", tools: "required" },
};
// The largest number of answers to one message: a model may answer each result with another call.
const MOST_ROUNDS = 4;

export class Chat {
  /** `request` returns the form's request: model, tokens, temperature, drafter and seed. */
  constructor(form, request) {
    this.form = form;
    this.request = request;
    this.log = form.querySelector(".log");
    this.problem = form.querySelector(".problem");
    this.send = form.querySelector("[type=submit]");
    this.history = [];
    this.stop = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      if (this.stop) this.stop.abort();
      else this.#ask();
    };
    form.elements.new.onclick = () => this.#begin();
    form.elements.tools.onchange = () => this.#showTools();
    for (const [name, { text, tools }] of Object.entries(MESSAGES)) {
      const button = document.createElement("button");
      [button.type, button.textContent] = ["button", name];
      button.onclick = () => {
        [form.elements.message.value, form.elements.tools.value] = [text, tools];
        this.#showTools();
      };
      form.querySelector(".presets").append(button);
    }
    const signatures = TOOLS.map(({ function: { name, parameters } }) =>
      `${name}(${parameters.required.join(", ")})`);
    form.querySelector(".offered").textContent =
      `The model may call ${signatures.join(" or ")}. This page computes the result.`;
    // A browser may fill in the choices of an earlier visit.
    this.#showTools();
  }

  #begin() {
    this.stop?.abort();
    this.history = [];
    this.log.replaceChildren();
    this.problem.hidden = true;
  }

  #showTools() {
    this.form.querySelector(".offered").hidden = this.form.elements.tools.value === "none";
  }

  async #ask() {
    const { message, tools } = this.form.elements;
    const stop = this.stop = new AbortController();
    const before = this.history;
    const history = this.history = [...before, { role: "user", content: message.value }];
    this.#show("user", message.value);
    message.value = "";
    this.send.textContent = "Stop";
    this.problem.hidden = true;
    try {
      let choice = tools.value;
      for (let round = 0; round < MOST_ROUNDS; round += 1) {
        const { content, calls } = await this.#answer(history, choice, stop.signal);
        history.push({ role: "assistant", content, ...calls.length && { tool_calls: calls } });
        if (!calls.length) break;
        for (const { id, function: call } of calls) {
          const result = resultOf(call);
          history.push({ role: "tool", tool_call_id: id, content: result });
          this.#show("tool", `${call.name} → ${result}`);
        }
        // Only the first call is forced: a model that knows no tools would go on calling them.
        if (choice === "required") choice = "none";
      }
    } catch (error) {
      // Say nothing if a new chat, with a history of its own, has begun meanwhile.
      if (this.history !== history) return;
      this.history = before;
      const reason = error.name === "AbortError" ? "Stopped." : error.message;
      this.problem.textContent = `${reason} The chat goes on without this message.`;
      this.problem.hidden = false;
    } finally {
      this.stop = null;
      this.send.textContent = "Send";
    }
  }

  /** Have the model answer the history. Returns the answer's text, and its tool calls. */
  async #answer(history, choice, signal) {
    const { system, thinking } = this.form.elements;
    const messages = [...history];
    if (system.value) messages.unshift({ role: "system", content: system.value });
    const more = {};
    if (thinking.value) {
      more.chat_template_kwargs = { enable_thinking: JSON.parse(thinking.value) };
    }
    if (choice !== "none") {
      Object.assign(more, {
        tools: TOOLS, tool_choice: choice, parallel_tool_calls: choice === "auto",
      });
    }
    const output = new Output(this.log, "the model");
    const calls = [];
    const take = (tokens, pieces) => {
      output.add(tokens, pieces);
      for (const { index, id, function: piece } of pieces) {
        calls[index] ??= { id, type: "function", function: { ...piece, arguments: "" } };
        calls[index].function.arguments += piece.arguments;
      }
    };
    const statistics = await complete({ ...this.request(), messages, more }, take, signal);
    output.show(figures(statistics, output.tokens), statistics.paused);
    return { content: statistics.content, calls };
  }

  #show(role, text) {
    const element = document.createElement("p");
    [element.className, element.textContent] = [role, text];
    this.log.append(element);
  }
}
