// The box to try a prompt: streams the answer and colours every token by where it comes from.

import { decisionRow } from "./rows.js";

const NAMES = ["accepted", "recovered", "bonus", "target"];
const at = (id) => document.getElementById(id);

export function connectTry(model) {
  let running = null;
  at("try").addEventListener("submit", (event) => {
    event.preventDefault();
    running?.abort();
    running = new AbortController();
    run(model(), running);
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("try").requestSubmit();
  });
}

async function run(model, controller) {
  at("answer").replaceChildren();
  at("answer-rounds").replaceChildren();
  at("answer-counts").textContent = "waiting for the first token …";
  at("stop").disabled = false;
  const counts = Object.fromEntries(NAMES.map((name) => [name, 0]));
  const started = performance.now();
  let usage = null, id = null;
  try {
    for await (const chunk of chunks(await ask(model, controller.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      id = chunk.id ?? id;
      for (const [text, origin] of chunk.choices[0]?.dspark?.provenance ?? []) {
        const token = document.createElement("span");
        token.className = `token ${origin}`;
        token.title = origin;
        token.textContent = text;
        at("answer").append(token);
        counts[origin] += 1;
      }
      at("answer-counts").textContent = summary(counts, usage, (performance.now() - started) / 1000);
    }
  } catch (error) {
    const what = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    at("answer-counts").textContent = `${what}. ${summary(counts, usage, (performance.now() - started) / 1000)}`;
  } finally {
    at("stop").disabled = true;
  }
  if (id) showRounds(id);
}

// Why each round of the answer was as long as it was.
async function showRounds(id) {
  const answer = await fetch(`/dashboard/rounds/${encodeURIComponent(id)}`, { headers: key() });
  if (answer.ok) at("answer-rounds").replaceChildren(...(await answer.json()).map(decisionRow));
}

function key() {
  return at("key").value ? { authorization: `Bearer ${at("key").value}` } : {};
}

async function ask(model, signal) {
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...key() },
    body: JSON.stringify({
      model: model || undefined,
      messages: [{ role: "user", content: at("prompt").value }],
      max_tokens: Number(at("max-tokens").value),
      temperature: Number(at("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
      dspark: { provenance: true, explain: true },
    }),
  });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  throw new Error(problem?.error?.message ?? `HTTP ${answer.status}`);
}

async function* chunks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment of a stream that waits
      const data = event.replace(/^data: /, "");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function summary(counts, usage, seconds) {
  const shown = NAMES.filter((name) => counts[name]).map((name) => `${counts[name]} ${name}`);
  const rounds = usage?.dspark?.num_rounds;
  if (rounds) {
    const { num_proposed: proposed, num_scheduled: scheduled, num_accepted: accepted } = usage.dspark;
    shown.push(`${rounds} rounds, ${(usage.completion_tokens / rounds).toFixed(2)} tokens a round`);
    shown.push(`of ${proposed} proposed ${scheduled} were verified and ${accepted} accepted`);
    shown.push(`${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`);
  }
  return shown.join(" · ");
}
