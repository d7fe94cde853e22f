// Polls /dashboard/state each second and shows it. Everything from the server is set as text, never as markup.

import { drawCurve, drawSurvival, milliseconds } from "./charts.js";
import { decisionRow, element } from "./rows.js";
import { connectTry } from "./try.js";

const POLL_MS = 1000, KEPT_DECISIONS = 12, WINDOW_S = 60;
const at = (id) => document.getElementById(id);
let history = []; // states of the last minute, for rates
let decisions = [], isFrozen = false;

async function poll() {
  try {
    const answer = await fetch("/dashboard/state", { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    at("status").textContent = `the server does not answer (${error.message}); trying again`;
    at("status").className = "lost";
  }
  setTimeout(poll, POLL_MS);
}

function show(state) {
  if (state.at_s !== null && state.at_s !== history.at(-1)?.at_s) history.push(state);
  history = history.filter((old) => state.at_s - old.at_s <= WINDOW_S);
  at("model").textContent = state.model;
  showStatus(state);
  at("rank-cards").replaceChildren(...state.ranks.map(rankCard));
  at("others").replaceChildren(...state.others.map(otherLine));
  showCharts(state);
  showDecisions(state.decisions);
  showStreams(state);
}

function showStatus(state) {
  const full = state.ranks.filter((rank) => rank.load === "saturated").map((rank) => rank.name);
  const away = state.ranks.filter((rank) => rank.load === "unknown").map((rank) => rank.name);
  const said = [`${state.num_streams} open stream${state.num_streams === 1 ? "" : "s"}`];
  said.push(full.length ? `saturated: ${full.join(", ")}` : "no rank is saturated");
  if (away.length) said.push(`not ready: ${away.join(", ")}`);
  if (state.at_s === null) said.splice(0, said.length, "nothing is known of the ranks yet");
  at("status").textContent = said.join(" · ");
  at("status").className = "";
}

// Growth of a counter over the last seconds; null while there is only one look.
function rate(name, key) {
  const seen = history.slice(-6).map((state) => [state.at_s, state.ranks.find((rank) => rank.name === name)?.[key]]);
  const known = seen.filter(([, count]) => count !== undefined);
  if (known.length < 2) return null;
  const [[from, before], [to, after]] = [known[0], known.at(-1)];
  return after >= before ? (after - before) / (to - from) : null;
}

function rankCard(rank) {
  const card = element("article", `card ${rank.load}`);
  const title = element("h3", "", rank.name);
  title.append(element("span", "badge", rank.load === "unknown" ? rank.state : rank.load));
  card.append(title, element("p", "why", rank.why));
  if (rank.num_running === undefined) return card;
  const facts = element("dl", "facts");
  const speed = rate(rank.name, "num_committed");
  fact(facts, "Speed", speed === null ? "…" : `${speed.toFixed(0)} tokens/s`);
  fact(facts, "Places taken", `${rank.num_running} of ${rank.max_running}`, rank.num_running / rank.max_running);
  fact(facts, "Waiting", `${rank.num_waiting}`);
  const used = 1 - rank.num_free_blocks / rank.num_blocks;
  fact(facts, "KV cache", `${(used * 100).toFixed(0)} %`, used);
  fact(facts, "Step", rank.step_time_s ? milliseconds(rank.step_time_s) : "…");
  fact(facts, "Foretold", rank.predicted_s === null ? "…" : milliseconds(rank.predicted_s));
  if (rank.step) {
    const most = rank.step.max_draft_tokens;
    fact(facts, "Tokens in a step", `${rank.step.batch_tokens}`);
    fact(facts, "Budget K", `${rank.step.num_scheduled} used of ${most === null ? "any number" : most}`,
      most ? rank.step.num_scheduled / most : undefined);
    fact(facts, "Price λ", `${(rank.step.min_survival * 100).toFixed(0)} %`);
    fact(facts, "Decided by", rank.step.rule);
  }
  if (rank.acceptance_length) fact(facts, "Tokens a round", rank.acceptance_length.toFixed(2));
  if (rank.num_late) fact(facts, "Late blocks", `${rank.num_late}`);
  if (rank.calibration.num_alarms) fact(facts, "Drift alarms", `${rank.calibration.num_alarms}`);
  if (rank.num_restarts) fact(facts, "Restarts", `${rank.num_restarts}`);
  if (rank.stale_s > 2) fact(facts, "Last heard", `${rank.stale_s.toFixed(0)} s ago`);
  card.append(facts);
  return card;
}

function fact(facts, name, value, share) {
  const shown = element("dd", "", value);
  if (share !== undefined) {
    const meter = element("span", share >= 0.95 ? "meter full" : "meter"), fill = element("i");
    fill.style.width = `${Math.min(100, share * 100)}%`;
    meter.append(fill);
    shown.append(meter);
  }
  facts.append(element("dt", "", name), shown);
}

function otherLine(member) {
  const line = element("span", member.state === "ready" ? "" : "dead");
  line.append(element("b", "", member.name), ` ${member.state}`);
  if (member.reason) line.append(`: ${member.reason}`);
  if (member.role === "drafter" && member.num_batches) {
    line.append(`, ${milliseconds(member.draft_time_s / member.num_batches)} a batch, ` +
      `${member.open_requests} context${member.open_requests === 1 ? "" : "s"}`);
  }
  if (member.role === "allocator" && member.num_budgets !== undefined) line.append(`, ${member.num_budgets} budgets`);
  if (member.num_restarts) line.append(`, restarted ${member.num_restarts} times`);
  return line;
}

function showCharts(state) {
  const ranks = state.ranks.filter((rank) => rank.acceptance);
  const recent = summed(ranks, history[0]?.ranks ?? []);
  const isRecent = recent !== null && recent.scheduled[0] > 0;
  drawSurvival(at("survival"), isRecent ? recent : summed(ranks, []));
  at("survival-hint").textContent = "Of the draft tokens verified at each place of a block: how many should survive, " +
    `how many did. ${isRecent ? "Last minute" : "Since the start"}, all ranks.`;
  const select = at("curve-rank");
  if (select.options.length !== ranks.length) {
    select.replaceChildren(...ranks.map((rank) => new Option(rank.name)));
  }
  const chosen = ranks.find((rank) => rank.name === select.value) ?? ranks[0];
  const now = chosen?.step && { tokens: chosen.step.batch_tokens, seconds: chosen.step_time_s };
  drawCurve(at("curve"), chosen?.curve, now);
}

// The counts of all ranks by position, less what they were in an earlier look.
function summed(ranks, earlier) {
  if (!ranks.length) return null;
  const total = { proposed: [], scheduled: [], accepted: [], expected: [] };
  for (const rank of ranks) {
    const before = earlier.find((old) => old.name === rank.name)?.acceptance;
    for (const key of Object.keys(total)) {
      rank.acceptance[key].forEach((count, k) => {
        const gone = before && before[key][k] <= count ? before[key][k] : 0;
        total[key][k] = (total[key][k] ?? 0) + count - gone;
      });
    }
  }
  return total;
}

function showDecisions(fresh) {
  const key = (each) => `${each.rank} ${each.step} ${each.request_id}`;
  const known = new Set(decisions.map(key));
  // At most two of a rank in each look, cut in different ways if there are, so that one step does not fill the list.
  const added = [...new Set(fresh.map((each) => each.rank))].flatMap((rank) => {
    const own = fresh.filter((each) => each.rank === rank && !known.has(key(each)));
    return own.length ? [own[0], own.find((each) => each.cut_by !== own[0].cut_by) ?? own[1]].filter(Boolean) : [];
  });
  decisions = [...added, ...decisions].slice(0, KEPT_DECISIONS);
  if (isFrozen) return;
  if (!decisions.length) {
    at("decisions").replaceChildren(element("li", "", "No round has run yet: try a prompt below."));
  } else if (added.length || !at("decisions").children.length) {
    at("decisions").replaceChildren(...decisions.map(decisionRow));
  }
}

function showStreams(state) {
  at("num-streams").textContent = `(${state.num_streams})`;
  const rows = state.streams.map((stream) => {
    const row = element("tr");
    const perRound = stream.num_rounds ? (stream.num_rounds + stream.num_accepted) / stream.num_rounds : null;
    row.append(element("td", "", stream.request_id.slice(0, 20)), element("td", "", stream.rank));
    for (const value of [`${stream.num_tokens} of ${stream.max_new_tokens}`, perRound?.toFixed(2) ?? "…",
      stream.num_scheduled, stream.num_accepted]) row.append(element("td", "num", value));
    return row;
  });
  if (!rows.length) {
    const empty = element("tr"), cell = element("td", "", "no stream is open");
    cell.colSpan = 6;
    empty.append(cell);
    rows.push(empty);
  }
  at("streams").replaceChildren(...rows);
}

at("freeze").addEventListener("click", () => {
  isFrozen = !isFrozen;
  at("freeze").setAttribute("aria-pressed", String(isFrozen));
  at("freeze").textContent = isFrozen ? "Go on" : "Hold still";
});

at("theme").addEventListener("click", () => {
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const isDark = (document.documentElement.dataset.theme ?? (systemIsDark ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
});

connectTry(() => at("model").textContent);
poll();
