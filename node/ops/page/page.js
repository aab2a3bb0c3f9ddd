// The page of a node. All figures come from the node (/events); nothing is computed here but rates and places.
// Strings may be a stranger's: they become text, cut and without control or bidirectional characters, never HTML.

import { short, showCharts } from "./charts.js";

const MAX_TEXT = 400, PAGE = 100, RETRY_MS = 3000, RATE_MS = 60000, RATE_LEAST_MS = 8000;
const $ = (id) => document.getElementById(id);
let token = "", figures = null, curves = null, shownCurves = null;

// -- text and elements ----------------------------------------------------------------------------

function clean(value, most = MAX_TEXT) {
  const text = String(value ?? "").slice(0, most + 1).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, "\ufffd");
  return text.length > most ? `${text.slice(0, most)}...` : text;
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== "") node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (minutes < 60) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

const version = (number) => (number < 0 ? "-" : String(number));
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell instanceof Node ? cell : clean(cell)))));
  const whole = element("table", {}, element("caption", { class: "skip" }, caption), element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

// Show a table below a heading, or nothing; where it has the same size as before only texts change: focus stays.
function showTable(place, caption, heads, rows) {
  const lines = [...(place.querySelector("tbody")?.rows ?? [])];
  if (lines.length !== rows.length) place.replaceChildren(...(rows.length ? [element("h3", {}, caption), table(caption, heads, rows)] : []));
  else rows.forEach((cells, at) => cells.forEach((cell, column) => put(lines[at].cells[column], clean(cell))));
}

// -- the run --------------------------------------------------------------------------------------

function tiles(status) {
  const rows = [], add = (name, value, note = "") => rows.push([name, value, note]);
  const rejected = sum(status.rejected), judged = status.accepted + rejected;
  const trainer = status.role === "trainer", machine = status.machine, engine = status.engine;
  if (trainer) {
    add("Step", `${status.step} of ${status.max_steps}`, status.step_s === null ? "" : `${short(status.step_s)} s each`);
    add("Time left", duration(status.eta_s), status.eta_s === null ? "" : `at the pace of the last steps`);
    add("Reward", short(status.reward));
    add("Loss", short(status.newest["loss/mean"]));
    add("Mismatch KL", short(status.newest["mismatch_kl/all/mean"]), "sampler against trainer");
    add("Staleness", short(status.staleness), "versions, mean of the batch");
    add("Throughput", short(status.newest["perf/throughput"]), "tokens/s trained");
    add("Version", version(status.version));
    if (figures.public) add("Workers", figures.workers.working ?? 0, Object.entries(figures.workers).filter(([state]) => state !== "working").map(([state, count]) => `${count} ${state}`).join(", "));
    else add("Leases out", status.leases, `${status.waiting_groups} groups wait`);
  } else {
    add("Your contribution", status.accepted, "rollouts accepted");
    add("Trust", status.trust === null ? "-" : status.trust.toFixed(2), "of the trainer in this node");
    add("Policy", version(status.version), `the newest is ${version(status.newest_version)}`);
    add("Leases held", status.leases);
    if (status.limits) addLimits(add, status.limits);
  }
  if (engine) add("Engine", `${short(engine.tokens_per_s)} tokens/s`, engine.fault ? clean(engine.fault) : `${engine.inflight} of ${engine.cap} in flight`);
  if (trainer) {
    const audited = figures.audited ?? figures.peers.reduce((total, row) => total + row.audited, 0);
    add("Accepted", status.accepted, "rollouts");
    add("Audited", audited, judged ? `${short((100 * audited) / judged)} % of the rollouts` : "");
  }
  add("Rejected", rejected, judged ? `${short((100 * rejected) / judged)} %` : "");
  if (!figures.public) add("Traffic", `${size(status.bytes_sent)} up`, `${size(status.bytes_received)} down`);
  if (machine) {
    add("Processor", `${machine.cpu_cores.toFixed(2)} cores`);
    if (machine.gpus) add(machine.gpus > 1 ? `${machine.gpus} GPUs` : "GPU", machine.gpu_busy === null ? "-" : `${Math.round(100 * machine.gpu_busy)} % busy`, `${size(machine.gpu_memory_bytes)} of ${size(machine.gpu_memory_total_bytes)}`);
    add("Memory", size(machine.memory_bytes), `${size(machine.disk_free_bytes)} free on disk`);
  }
  add("Up", duration(status.uptime_s), clean(status.software ?? ""));
  const list = $("tiles");
  while (list.children.length > rows.length) list.lastChild.remove();
  rows.forEach(([name, value, note], at) => {
    if (!list.children[at]) list.append(element("div", {}, element("dt"), element("dd", {}, element("span"), element("small"))));
    const [term, figure] = list.children[at].children;
    put(term, name); put(figure.children[0], String(value)); put(figure.children[1], String(note));
  });
}

// What the node's owner allows it. Nothing is set here: the notes name the command.
function addLimits(add, limits) {
  if (limits.paused) add("Paused", clean(limits.paused), "primerl-node resume");
  else add("Works", limits.hours ? clean(limits.hours, 80) : "always", limits.when === "idle" ? "when nobody else computes" : "primerl-node pause --for 2h");
  const most = (rate) => (rate ? `${rate} Mbit/s` : "no limit");
  if (limits.upload || limits.download) add("Line", `${most(limits.upload)} up`, `${most(limits.download)} down; change limits.* and primerl-node reload`);
  const used = limits.month_sent + limits.month_received;
  const whole = limits.monthly_gb ? `${size(used)} of ${limits.monthly_gb} GB` : size(used);
  add(`Bytes in ${clean(limits.month, 10)}`, whole, limits.serves ? `${size(limits.month_sent)} up, ${size(limits.month_received)} down` : "serves no chunks");
}

const CHARTS = [
  ["Loss", "loss/mean"], ["Mismatch KL", "mismatch_kl/all/mean"], ["Staleness, versions", "off_policy/mean"],
  ["Throughput, tokens/s", "perf/throughput"], ["Wait for a batch, s", "time/wait_for_batch"],
];

function drawCurves() {
  const { steps, values } = curves, points = (name) => steps.map((step, at) => [step, values[name][at]]);
  const environments = Object.keys(values).filter((name) => name.startsWith("reward/") && name !== "reward/mean");
  const rewards = [["mean", "reward/mean"], ...(environments.length > 1 ? environments.slice(0, 11).map((name) => [name.slice(7), name]) : [])];
  const series = rewards.filter(([, name]) => values[name]).map(([label, name]) => ({ name: clean(label, 40), points: points(name) }));
  const others = CHARTS.filter(([, name]) => values[name]).map(([title, name]) => ({ title, series: [{ name: "", points: points(name) }] }));
  showCharts($("charts"), [{ title: "Reward", series }, ...others]);
}

function drawRun() {
  const { status } = figures;
  put($("title"), clean(status.run_name || status.role, 80));
  document.title = clean(`${status.run_name || status.role} - primerl-node`, 80);
  put($("phase"), clean(status.phase + (status.detail && status.phase !== "running" ? `: ${status.detail}` : "")));
  put($("run-head"), status.role === "trainer" ? "Run" : "This node");
  $("waiting").hidden = !status.waiting_for;
  put($("waiting"), status.waiting_for ? `Waiting: ${clean(status.waiting_for)}` : "");
  const warnings = [...(status.warnings ?? []), ...(status.environment ? [`environment: ${status.environment}`] : [])].slice(0, 20);
  $("warnings").hidden = !warnings.length;
  const text = warnings.map((line) => clean(line));
  if ($("warnings").dataset.text !== text.join("\n")) {
    $("warnings").dataset.text = text.join("\n");
    $("warnings").replaceChildren(...text.map((line) => element("li", {}, line)));
  }
  tiles(status);
  for (const link of document.querySelectorAll("nav [data-role]")) link.hidden = link.dataset.role !== status.role;
  for (const part of document.querySelectorAll("[data-private]")) part.hidden = figures.public || part.hidden;
  if (curves && curves !== shownCurves) { drawCurves(); shownCurves = curves; }
  const rows = status.environments.map((row) => [row.name, short(row.reward), row.accepted, row.rejected, `${Math.round(100 * row.share)} %`, row.workers]);
  showTable($("environments"), "Environments", ["Name", "Reward", "Accepted", "Rejected", "Share", "Workers"], rows);
  const reasons = Object.entries(status.rejected).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  showTable($("rejections"), "Rejected rollouts by reason", ["Reason", "Rollouts"], reasons);
}

// -- peers ----------------------------------------------------------------------------------------

function stateOf(row) {
  if (figures.public) return [{ working: "good", silent: "warn", refused: "bad" }[row.state] ?? "dim", row.state];
  if (row.refused) return ["bad", row.refused];
  if (row.second) return ["bad", row.second];
  if (row.left) return ["dim", `left ${duration(row.silent_s)} ago`];
  if (row.silent_s) return ["warn", `silent for ${duration(row.silent_s)}`];
  if (row.paused) return ["dim", `paused: ${row.paused}`];
  if (row.suspicion >= 0.5) return ["warn", `suspicious, ${Math.round(100 * row.suspicion)} % of the way to a ban`];
  if (row.starting) return ["dim", "starting"];
  if (row.stage) return ["", `stage ${row.stage}`];
  return row.path === "-" ? ["dim", "not connected"] : ["good", row.audits ? `${row.audits} audits made` : "connected"];
}

const worked = (row) => row.accepted + row.rejected > 0;
const reasonsOf = (row) => Object.entries(row.reasons).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${count}`).join(", ");
const COLUMNS = [
  // name, text, sort key (smallest first), class
  ["Peer", (row) => `${row.short} ${clean(row.name ?? "", 32)}`.trim(), (row) => row.short, ""],
  ["Role", (row) => row.role, (row) => row.role, ""],
  ["State", (row) => stateOf(row)[1], (row) => stateOf(row)[1], "state"],
  ["Path", (row) => row.path, (row) => row.path, ""],
  ["RTT", (row) => (row.rtt_ms === null ? "" : `${row.rtt_ms.toFixed(1)} ms`), (row) => row.rtt_ms ?? Infinity, "number"],
  ["Version", (row) => version(row.version), (row) => -row.version, "number"],
  ["Lag", (row) => (row.version < 0 ? "" : String(row.lag)), (row) => -row.lag, "number"],
  ["Accepted/min", (row) => (rate(row) === null ? "" : rate(row).toFixed(1)), (row) => -(rate(row) ?? -1), "number"],
  ["Accepted", (row) => (worked(row) ? String(row.accepted) : ""), (row) => -row.accepted, "number"],
  ["Rejected", (row) => (worked(row) ? row.rejected + (row.top_reason ? ` (${row.top_reason})` : "") : ""), (row) => -row.rejected, "number"],
  ["Trust", (row) => (worked(row) ? `${row.trust.toFixed(2)} (at least ${row.trust_low.toFixed(2)})` : ""), (row) => row.trust, "number"],
  ["Received", (row) => size(row.bytes_received), (row) => -row.bytes_received, "number"],
  ["Sent", (row) => size(row.bytes_sent), (row) => -row.bytes_sent, "number"],
  ["Seen", (row) => (row.last_seen_s === null ? "" : `${duration(row.last_seen_s)} ago`), (row) => row.last_seen_s ?? Infinity, "number"],
];
const PUBLIC = new Set(["Peer", "Role", "State", "Version", "Lag", "Accepted/min", "Accepted", "Rejected", "Trust"]);
let columns = COLUMNS, sorted = { column: 0, reversed: false }, limit = PAGE;
const rowsById = new Map(), counts = [];  // counts: [time, id -> accepted] of the last minute

function remember() {
  const now = Date.now();
  counts.push([now, new Map(figures.peers.map((row) => [row.id, row.accepted]))]);
  while (counts.length > 2 && counts[0][0] < now - RATE_MS) counts.shift();
}

function rate(row) {
  if (!worked(row) || !counts.length) return null;
  const [then, before] = counts[0], [now] = counts[counts.length - 1], was = before.get(row.id);
  return was === undefined || now - then < RATE_LEAST_MS ? null : Math.max(0, row.accepted - was) / ((now - then) / 60000);
}

function drawHead() {
  const cells = columns.map(([name, , , kind], at) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      sorted = { column: at, reversed: sorted.column === at && !sorted.reversed };
      markSorted(); drawPeers();
    });
    return element("th", { scope: "col", class: kind }, button);
  });
  $("table").tHead.replaceChildren(element("tr", {}, ...cells));
  markSorted();
}

function markSorted() {
  [...$("table").tHead.rows[0].cells].forEach((cell, at) => {
    if (at === sorted.column) cell.setAttribute("aria-sort", sorted.reversed ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

function drawPeers() {
  const words = $("filter").value.trim().toLowerCase();
  const text = (row) => (figures.public ? [row.short, row.role, row.state] : [row.id, row.name, row.role, row.path, stateOf(row)[1], reasonsOf(row), row.software]).join(" ").toLowerCase();
  const rows = words ? figures.peers.filter((row) => text(row).includes(words)) : [...figures.peers];
  const key = columns[sorted.column][2], way = sorted.reversed ? -1 : 1;
  const keyed = rows.map((row) => [key(row), row]);
  keyed.sort(([a, one], [b, other]) => way * (a < b ? -1 : a > b ? 1 : 0) || (one.id < other.id ? -1 : 1));
  const shown = keyed.slice(0, limit).map(([, row]) => row), body = $("table").tBodies[0];
  put($("count"), `${rows.length} of ${figures.peers.length}`);
  $("more").hidden = rows.length <= limit;
  const ids = new Set(shown.map((row) => row.id));
  for (const [id, line] of rowsById) if (!ids.has(id)) { line.remove(); rowsById.delete(id); }
  shown.forEach((row, at) => {
    let line = rowsById.get(row.id);
    if (!line) {
      line = element("tr", {}, ...columns.map(([name, , , kind]) => element("td", { class: kind, "data-label": name })));
      line.cells[0].append(figures.public ? element("span") : element("a", { href: `#peer/${encodeURIComponent(row.id)}` }));
      rowsById.set(row.id, line);
    }
    columns.forEach(([, cell, , kind], place) => {
      const value = clean(cell(row)), node = line.cells[place];
      put(place ? node : node.firstChild, value);
      const mark = `${kind} ${kind === "state" ? stateOf(row)[0] : ""} ${value ? "" : "empty"}`.trim();
      if (node.className !== mark) node.className = mark;
    });
    if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
  });
}

// Who sent whom the weights: the largest flows, as the receivers say.
function drawFlows() {
  const flows = figures.peers.flatMap((row) => Object.entries(row.chunk_bytes).map(([source, bytes]) => [bytes, source, row]));
  const rows = flows.sort((a, b) => b[0] - a[0]).slice(0, 50).map(([bytes, source, row]) => [source, row.short, size(bytes), version(row.version)]);
  showTable($("flows"), "Weights: who sent whom", ["From", "To", "Bytes", "Its version now"], rows);
}

let openPeer = "";

function drawPeer() {
  const row = figures.peers.find((peer) => peer.id === openPeer);
  put($("peer-head"), row ? `Peer ${clean(`${row.short} ${row.name}`, 48)}` : "Peer");
  const facts = !row ? [["", "not known here any more"]] : [
    ["Id", row.id], ["Role", row.role], ["State", stateOf(row)[1]], ["Software", row.software], ["Numerics", row.numerics],
    ...COLUMNS.slice(3).map(([name, text]) => [name, text(row)]),
    ["Rejected by reason", reasonsOf(row)], ["Audited", row.audited || ""], ["Leases", row.leases || ""],
    ["Trust by environment", Object.entries(row.trusts).map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ")],
    ["Weights from", Object.entries(row.chunk_bytes).map(([source, bytes]) => `${source} ${size(bytes)}`).join(", ")],
    ["Reliability", row.reliability.toFixed(2)], ["Evidence", row.suspicion ? `${Math.round(100 * row.suspicion)} % of what a ban takes` : ""],
  ];
  $("peer-facts").replaceChildren(...facts.filter(([, value]) => value !== "" && value !== "-").flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, clean(value))]));
}

async function drawVerdicts() {
  const verdicts = await ask("verdicts", { peer: openPeer }, $("verdicts"));
  if (!verdicts) return;
  const rows = verdicts.map((line) => [line.number, line.lease, line.accepted, line.rejected, line.audited, line.fault || line.reason || "clean"]);
  $("verdicts").replaceChildren(rows.length ? table("Verdicts, newest first", ["Number", "Lease", "Accepted", "Rejected", "Audited", "Reason"], rows)
    : element("p", {}, "none kept"), element("p", { class: "dim" }, "`primerl-node explain` shows the evidence."));
}

// -- what is asked for when it is opened ------------------------------------------------------------

async function ask(query, parameters, place) {
  try {
    const reply = await fetch(`/api/${query}?${new URLSearchParams(parameters)}`, { headers: { Authorization: `Bearer ${token}` } });
    if (reply.ok) return await reply.json();
    put(place, clean(await reply.text()));
  } catch { put(place, "the node does not answer"); }
  return null;
}

async function drawEvaluations() {
  const lines = await ask("evaluations", {}, $("evaluation-table"));
  if (!lines) return;
  const rows = [], series = new Map();
  for (const { version: number, environment, reward, low, high, figures: each } of lines) {
    if (!series.has(environment)) series.set(environment, []);
    series.get(environment).push([number, reward]);
    const interval = low === null ? "" : ` (${short(low)} to ${short(high)})`;
    rows.push([number, environment, short(reward) + interval, Object.entries(each).map(([key, value]) => `${key} ${short(value)}`).join(", ")]);
  }
  const evaluated = [...series].slice(0, 12).map(([name, points]) => ({ name: clean(name, 40), points }));
  showCharts($("evaluation-charts"), [{ title: "Reward of evaluations", series: evaluated, axis: "version" }]);
  $("evaluation-table").replaceChildren(rows.length ? table("Evaluations, newest first", ["Version", "Environment", "Reward, 95 %", "Figures"], rows.reverse()) : element("p", {}, "no version has been evaluated beside training"));
}

async function drawAudits() {
  const lines = await ask("audits", {}, $("audit-table"));
  if (!lines) return;
  const marks = { clean: "good", suspect: "warn" };
  const rows = lines.map((line) => [
    line.number, element("a", { href: `#peer/${encodeURIComponent(line.worker)}` }, clean(line.worker.slice(0, 10))), version(line.version),
    element("span", { class: marks[line.result] ?? "bad" }, clean(line.result)), line.measure ? `${line.measure.name} ${short(line.measure.value)} of ${short(line.measure.reject)}` : "",
    `${line.audited} of ${line.rollouts} rollouts, ${short(line.tokens)} tokens`, line.validator ? line.validator.slice(0, 10) : "trainer", line.reason,
  ]);
  $("audit-table").replaceChildren(rows.length ? table("Audits, newest first", ["Number", "Peer", "Version", "Result", "Closest to its bound", "Cost", "By", "Reason"], rows) : element("p", {}, "none yet"),
    element("p", { class: "dim" }, "A token is read again by one prefill of the auditor. `primerl-node explain` shows the evidence."));
}

async function drawRollouts(step = "") {
  const answer = await ask("rollouts", step === "" ? {} : { step }, $("rollout-table"));
  if (!answer) return;
  $("step").replaceChildren(...answer.steps.slice().reverse().map((number) => element("option", { value: number }, String(number))));
  $("step").value = String(answer.step);
  const rows = answer.rollouts.map((row) => {
    const button = element("button", { type: "button" }, clean(row.place));
    button.addEventListener("click", () => drawRollout(row.place));
    return [button, row.environment, row.verdict + (row.reason ? `: ${row.reason}` : ""), short(row.reward), short(row.advantage), row.worker.slice(0, 10), row.detail];
  });
  const more = answer.more ? [element("p", {}, `and ${answer.more} more: primerl-node rollouts --step ${answer.step}`)] : [];
  $("rollout-table").replaceChildren(rows.length ? table("Rollouts of the step", ["Read", "Environment", "Verdict", "Reward", "Advantage", "Worker", "Detail"], rows) : element("p", {}, "none are kept yet"), ...more);
}

async function drawRollout(place) {
  const branches = await ask("rollout", { place }, $("rollout"));
  if (!branches) return;
  const shown = branches.flatMap((branch) => [
    element("h3", { tabindex: "-1" }, `Rollout ${clean(branch.place)}`),
    ...branch.parts.filter(([text]) => text).map(([text, drawn]) => {
      const visible = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, "\ufffd");
      return element("div", { class: drawn ? "part drawn" : "part" }, element("span", { class: "dim" }, drawn ? "model: " : "environment: "), visible);
    }),
  ]);
  $("rollout").replaceChildren(...shown);
  $("rollout").querySelector("h3")?.focus();
}

async function drawLog() {
  const lines = await ask("log", {}, $("log-lines"));
  if (!lines) return;
  const marks = { warning: "warn", error: "bad", critical: "bad" };
  const items = lines.map((line) => element("li", { class: marks[line.level] ?? "" },
    `${new Date(1000 * line.time).toLocaleTimeString()} ${clean(line.level)} ${clean(line.logger)}: ${clean(line.message, 2000)}`));
  $("log-lines").replaceChildren(...items);
  $("log-lines").scrollTop = $("log-lines").scrollHeight;
}

async function drawTicket() {
  const answer = await ask("ticket", {}, $("ticket-text"));
  if (!answer) return;
  const until = new Date(1000 * answer.expires).toLocaleString();
  $("ticket-text").replaceChildren(element("p", {}, `Valid until ${until}. Join by:`), element("code", {}, `primerl-node join --ticket ${clean(answer.ticket, 9000)}`));
}

// -- views ------------------------------------------------------------------------------------------

function route() {
  const [view, argument] = location.hash.slice(1).split("/");
  const sections = [...document.querySelectorAll("main > section")];
  const section = sections.find((one) => one.id === view) ?? (view === "main" ? sections.find((one) => !one.hidden) : null) ?? $("run");
  for (const one of sections) one.hidden = one !== section;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash === `#${section.id === "peer" ? "peers" : section.id}`;
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (section.id !== "ticket") $("ticket-text").replaceChildren();
  if (section.id === "peer") {
    openPeer = decodeURIComponent(argument ?? "");
    $("verdicts").replaceChildren();
    drawVerdicts();
  }
  const first = { audits: drawAudits, evaluations: drawEvaluations, rollouts: () => drawRollouts(), log: drawLog }[section.id];
  if (first) first();
  draw();
}

function draw() {
  if (!figures) return;
  drawRun();
  if (!$("peers").hidden) { drawPeers(); if (!figures.public) drawFlows(); }
  if (!$("peer").hidden && !figures.public) drawPeer();
}

// -- events -----------------------------------------------------------------------------------------

// A page for the world has fewer columns, and names a peer by the beginning of its id.
function usePublic() {
  for (const row of figures.peers) row.id = row.short;
  if (columns !== COLUMNS) return;
  columns = COLUMNS.filter(([name]) => PUBLIC.has(name));
  drawHead();
}

function take(event, data) {
  if (event === "figures") { figures = JSON.parse(data); if (figures.public) usePublic(); remember(); draw(); }
  else if (event === "curves") { curves = JSON.parse(data); draw(); }
}

async function follow() {
  const reply = await fetch("/events", { headers: { Authorization: `Bearer ${token}` } });
  if (reply.status === 401) throw new Error("this link is of an earlier start: `primerl-node dashboard` prints the new one");
  if (!reply.ok) throw new Error(clean(await reply.text()));
  put($("connection"), "live");
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const fields = Object.fromEntries(rest.slice(0, end).split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      take(fields.event, fields.data);
    }
  }
}

async function main() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem("token") ?? "";
  drawHead();
  addEventListener("hashchange", () => { if (location.hash.startsWith("#token=")) location.reload(); else { route(); $("main").focus({ preventScroll: true }); } });
  $("filter").addEventListener("input", () => { limit = PAGE; if (figures) drawPeers(); });
  $("more").addEventListener("click", () => { limit += PAGE; drawPeers(); });
  $("step").addEventListener("change", () => drawRollouts($("step").value));
  $("log-again").addEventListener("click", drawLog);
  $("audits-again").addEventListener("click", drawAudits);
  $("show-ticket").addEventListener("click", drawTicket);
  route();
  for (;;) {
    try { await follow(); put($("connection"), "the node has gone: waiting for it"); }
    catch (error) { put($("connection"), error instanceof TypeError ? "the node does not answer: waiting for it" : error.message); }
    await new Promise((again) => setTimeout(again, RETRY_MS));
  }
}

main();
