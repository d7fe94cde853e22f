// Two small charts, drawn as SVG. No library: the page must work without a network.

const SVG = "http://www.w3.org/2000/svg";
let WIDTH = 520;
const HEIGHT = 220, LEFT = 56, BOTTOM = 34, TOP = 12, RIGHT = 10;

function shape(kind, attributes, text) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function frame(into, label) {
  WIDTH = Math.max(280, into.clientWidth || 520); // text keeps its size, whatever the window
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
}

function nothing(into, text) {
  const said = document.createElement("p");
  said.className = "empty";
  said.textContent = text;
  into.replaceChildren(said);
}

function yAxis(svg, y, ticks, format) {
  for (const value of ticks) {
    svg.append(shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "axis" }));
    svg.append(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
}

// counts: proposed, scheduled, accepted, expected, each a list by position.
export function drawSurvival(into, counts) {
  if (!counts || !counts.proposed.some((n) => n > 0)) return nothing(into, "no draft token was proposed yet");
  const gamma = counts.proposed.length;
  const share = (part, whole) => (whole > 0 ? part / whole : 0);
  const svg = frame(into, "Share of draft tokens verified, forecast to survive and accepted, by position in the block");
  const y = (value) => TOP + (1 - value) * (HEIGHT - TOP - BOTTOM);
  yAxis(svg, y, [0, 0.25, 0.5, 0.75, 1], (value) => `${value * 100} %`);
  const step = (WIDTH - LEFT - RIGHT) / gamma, bar = Math.min(step / 4, 34);
  for (let k = 0; k < gamma; k += 1) {
    const middle = LEFT + step * (k + 0.5);
    const values = [
      ["verified", share(counts.scheduled[k], counts.proposed[k])],
      ["forecast", share(counts.expected[k], counts.scheduled[k])],
      ["accepted", share(counts.accepted[k], counts.scheduled[k])],
    ];
    values.forEach(([name, value], i) => {
      const x = middle + (i - 1.5) * (bar + 2);
      const drawn = shape("rect", { x, y: y(value), width: bar, height: y(0) - y(value), rx: 2, class: `bar ${name}` });
      drawn.append(shape("title", {}, `token ${k + 1}: ${name} ${(value * 100).toFixed(0)} %`));
      svg.append(drawn);
    });
    svg.append(shape("text", { x: middle, y: HEIGHT - 14, "text-anchor": "middle" }, `token ${k + 1}`));
  }
  into.replaceChildren(svg);
}

// curve: batch_tokens, measured_s, corrected_s; now: {tokens, seconds} or null.
export function drawCurve(into, curve, now) {
  if (!curve) return nothing(into, "no cost curve was measured yet");
  const most = Math.max(...curve.batch_tokens, now ? now.tokens : 0);
  const slowest = 1.1 * Math.max(...curve.measured_s, ...curve.corrected_s, now ? now.seconds : 0);
  const svg = frame(into, "Seconds of a step by its tokens, with the present step");
  const logged = (tokens) => Math.log2(Math.max(tokens, 1));
  const x = (tokens) => LEFT + (logged(tokens) / Math.max(logged(most), 1)) * (WIDTH - LEFT - RIGHT - 8);
  const y = (seconds) => TOP + (1 - seconds / slowest) * (HEIGHT - TOP - BOTTOM);
  yAxis(svg, y, [0, 0.25, 0.5, 0.75, 1].map((part) => part * slowest), milliseconds);
  for (let tokens = 1; tokens <= most; tokens *= 2) {
    svg.append(shape("text", { x: x(tokens), y: HEIGHT - 18, "text-anchor": "middle" }, tokens));
  }
  svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "tokens in the step"));
  const path = (seconds) => curve.batch_tokens.map((n, i) => `${i ? "L" : "M"}${x(n)} ${y(seconds[i])}`).join("");
  svg.append(shape("path", { d: path(curve.measured_s), class: "curve measured" }));
  svg.append(shape("path", { d: path(curve.corrected_s), class: "curve" }));
  if (now) {
    const dot = shape("circle", { cx: x(now.tokens), cy: y(now.seconds), r: 7, class: "now" });
    dot.append(shape("title", {}, `now: ${now.tokens} tokens, ${milliseconds(now.seconds)}`));
    svg.append(dot);
  }
  into.replaceChildren(svg);
}

export function milliseconds(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = seconds * 1000;
  return `${ms >= 10 || ms === 0 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}
