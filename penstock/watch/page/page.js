// Fetches snapshot.json every second and draws it. All text is inserted as text, never as HTML.

import { chart } from "./chart.js";

const EVERY = 1000;
// Shortest wait for a batch, and shortest pause between batches, that are shown (seconds).
const SHORT = 1, QUIET = 5;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)} %`;

function compact(value) {
  for (const [unit, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= scale) return `${+(value / scale).toFixed(1)}${unit}`;
  }
  return `${+value.toFixed(1)}`;
}

function bytes(value) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (value >= scale) return `${(value / scale).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

function span(seconds) {
  const left = Math.max(0, Math.round(seconds));
  if (left < 60) return `${left} s`;
  if (left < 3600) return `${Math.floor(left / 60)} min ${left % 60} s`;
  return `${Math.floor(left / 3600)} h ${Math.floor((left % 3600) / 60)} min`;
}

function figure(kind, value, label) {
  return make("div", { class: `figure ${kind}` }, make("b", {}, value), make("span", {}, label));
}

function track(share) {
  const fill = make("div", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return make("div", { class: "track" }, fill);
}

// columns: [title, class]; rows: lists of texts or nodes.
function table(columns, rows) {
  const head = columns.map(([title, kind]) => make("th", { class: kind, scope: "col" }, title));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, at) => make("td", { class: columns[at][1] }, cell))),
  );
  return make(
    "div",
    { class: "scroll" },
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)),
  );
}

function part(title, ...content) {
  return make("div", {}, make("h3", {}, title), ...content);
}

function position(loader, now) {
  const { epoch, batch, batches, rank, world, share } = loader.standing;
  const words = [`epoch ${epoch}`, `batch ${whole(batch)}${batches ? ` of ${whole(batches)}` : ""}`];
  if (world > 1) words.push(`rank ${rank} of ${world}`);
  if (share) words.push(`shares ${share}`);
  const waited = loader.waiting === null ? 0 : now - loader.waiting;
  if (waited >= SHORT) words.push(`waiting for a batch for ${span(waited)}`);
  else if (loader.waiting === null && loader.age >= QUIET) words.push(`no batch taken for ${span(loader.age)}`);
  return words.join(", ");
}

function stages(loader) {
  const active = loader.rates.stops.filter((stop) => stop.seconds_per_sample !== null);
  if (!active.length) return null;
  const columns = [["stage", ""], ["samples/s", "number"], ["ms/sample", "number"], ["share of work", "wide"]];
  const rows = active.map((stop) => [
    // The name of a fused stage is long. It may be wrapped where its parts are joined.
    stop.name.replaceAll("+", "+\u200b"),
    whole(stop.samples_per_second),
    (1e3 * stop.seconds_per_sample).toFixed(3),
    track(stop.share),
  ]);
  return part("Stages, now", table(columns, rows));
}

function caches(loader) {
  const { caches: listed, refurbish, echo, device } = loader.stats;
  const rows = listed.map((cache, at) => [
    listed.length > 1 ? `cache ${at}` : "cache",
    loader.rates.hits[at] === null ? "no lookups" : `${percent(loader.rates.hits[at])} hits`,
    `${bytes(cache.used)} of ${bytes(cache.budget)}${cache.full ? ", full" : ""}`,
    track(cache.budget ? cache.used / cache.budget : 0),
  ]);
  if (refurbish) {
    const reused = refurbish.reused / Math.max(1, refurbish.reused + refurbish.fresh);
    rows.push(["refurbish", `${percent(reused)} reused`, bytes(refurbish.used), track(reused)]);
  }
  if (echo) rows.push(["echo", `factor ${echo.factor}`, `${whole(echo.delivered)} samples`, ""]);
  if (device) {
    const share = device.samples / Math.max(1, device.samples + device.cpu_samples);
    const state = device.lost ? "lost" : `t = ${device.threshold}, ${device.mode}`;
    rows.push([`device ${device.name}`, `${percent(share)} of samples`, `${bytes(device.copied)} copied, ${state}`, track(share)]);
  }
  if (!rows.length) return null;
  return part(device ? "Cached and reused samples, device" : "Cached and reused samples", table([["", ""], ["now", "number"], ["holds", "number"], ["", "wide"]], rows));
}

function mix(loader) {
  const listed = loader.stats.mix;
  if (!listed.length) return null;
  const columns = [["source", ""], ["this epoch", "number"], ["passes", "number"], ["by weight", "number"], ["", "wide"]];
  const rows = listed.map((one) => [one.name, whole(one.samples), one.passes.toFixed(2), percent(one.share), track(one.share)]);
  return part("Sources of the mix", table(columns, rows));
}

function bad(loader) {
  const { bad: count, bad_samples: listed } = loader.stats;
  if (!count) return null;
  const rows = [...listed].reverse().map((sample) => [sample.name, `${sample.index}`, sample.stage, sample.error]);
  const columns = [["sample", ""], ["index", "number"], ["stage", ""], ["error", "wide"]];
  return part(`Bad samples: ${whole(count)}`, table(columns, rows));
}

function workersOf(pool) {
  if (pool.kind === "none") return "the training loop, no workers";
  const singular = { threads: "thread", processes: "process", crew: "thread of a crew" };
  const plural = pool.kind === "crew" ? "threads of a crew" : pool.kind;
  return `${pool.workers} ${pool.workers === 1 ? (singular[pool.kind] ?? pool.kind) : plural}`;
}

function card(loader, now) {
  const { rates, overall, standing, stats } = loader;
  const points = (at) => loader.points.map((point) => [point[0], point[at]]);
  const figures = [
    figure("stall", percent(rates.stall), `stalled now, ${percent(overall.stall)} since the first batch`),
    figure("rate", whole(rates.samples_per_second), "samples/s"),
    figure("", rates.batches_per_second.toFixed(1), "batches/s"),
    figure("", `${bytes(rates.bytes_read_per_second)}/s`, "read from the source"),
    figure("", `${standing.finished} + ${standing.unfinished}`, `batches ready + in preparation, ${standing.slots} slots`),
    stats.pool.kind === "node"
      ? figure("", "node", "prepares the batches")
      : figure("", percent(rates.utilisation), `busy: ${workersOf(stats.pool)}`),
    ...stats.machines.map((machine) => figure("", whole(machine.samples), `samples prepared by ${machine.name}`)),
  ];
  return make(
    "article",
    { class: "card" },
    make("h2", {}, `process ${loader.pid}, loader ${loader.number}: ${loader.command}`),
    make("p", { class: "soft" }, standing.name),
    make("p", {}, position(loader, now)),
    make("div", { class: "figures" }, ...figures),
    make(
      "div",
      { class: "charts" },
      part("Stall", chart("stall", "share of time stalled", points(1), now, 1, percent)),
      part("Samples per second", chart("rate", "samples per second", points(2), now, null, compact)),
    ),
    make("div", { class: "columns" }, stages(loader), caches(loader), mix(loader)),
    bad(loader),
  );
}

function groupOf(group) {
  const columns = [["process", "number"], ["part", ""], ["epoch", "number"], ["batch", "number"], ["ready", "number"]];
  const rows = group.members.map((member) => [
    `${member.pid}`,
    member.part,
    `${member.epoch}`,
    `${member.batch ?? "?"}${member.batches ? ` of ${whole(member.batches)}` : ""}`,
    `${member.ready}`,
  ]);
  const staged = `${whole(group.staged_batches)} batches staged, ${bytes(group.staged)} of ${bytes(group.budget)}`;
  const counts = `${staged}; prepared ${whole(group.prepared)}, given ${whole(group.given)}`;
  return part(`Group ${group.name}`, make("p", {}, group.broken ?? counts), table(columns, rows));
}

function nodeCard(node) {
  const facts = `process ${node.pid}, up ${span(node.up)}, ${node.workers} workers, ${node.cpu.toFixed(1)} s of CPU`;
  return make("article", { class: "card" }, make("h2", {}, "Node"), make("p", { class: "soft" }, facts), ...node.groups.map(groupOf));
}

const unknown = (value, format) => (value === null ? "?" : format(value));

// An HTML element with its class and text.
const mark = (kind, text) => make("span", { class: kind }, text);

function milliseconds(seconds) {
  if (seconds === null) return "-";
  return `${(1e3 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}

function stateOf(machine) {
  const words = [mark(`state ${machine.state}`, machine.state)];
  if (machine.head) words.push(mark("note", "head"));
  if (machine.here) words.push(mark("note", "this machine"));
  if (machine.slow) words.push(mark("state slow", "slow"));
  return make("div", { class: "states" }, ...words);
}

// Where the samples of batches were found, as a bar of three parts.
function foundBar(here, elsewhere, storage) {
  const total = here + elsewhere + storage;
  if (!total) return "-";
  const parts = [["here", here], ["elsewhere", elsewhere], ["storage", storage]];
  const bar = make("div", { class: "track found" });
  for (const [kind, count] of parts) {
    const piece = make("div", { class: kind });
    piece.style.width = `${(100 * count) / total}%`;
    bar.append(piece);
  }
  const words = parts.map(([kind, count]) => `${percent(count / total)} ${kind}`).join(", ");
  return make("div", {}, bar, mark("soft small", words));
}

function machineTable(cluster) {
  const columns = [["machine", ""], ["state", ""], ["role", ""], ["idle cores", "number"], ["cache holds", "number"], ["samples of its batches were found", "wide"]];
  const rows = cluster.machines.map((machine) => [
    make("div", {}, machine.name, make("div", { class: "soft small" }, machine.address)),
    stateOf(machine),
    machine.role,
    machine.cores === null ? "?" : `${machine.idle_cores.toFixed(1)} of ${machine.cores}`,
    make(
      "div",
      {},
      `${unknown(machine.used_bytes, bytes)} of ${bytes(machine.cache_bytes)}`,
      machine.cache_bytes ? track((machine.used_bytes ?? 0) / machine.cache_bytes) : "",
    ),
    machine.local === null ? "?" : foundBar(machine.local, machine.remote, machine.storage),
  ]);
  return part("Machines", table(columns, rows));
}

function trafficTable(cluster) {
  const others = cluster.machines.filter((machine) => !machine.here);
  if (!others.length) return null;
  const columns = [["machine", ""], ["sent to it", "number"], ["per second", "number"], ["got from it", "number"], ["per second", "number"], ["answers in", "number"], ["95 % in", "number"], ["hedged", "number"]];
  const rows = others.map((machine) => [
    machine.slow ? make("div", {}, machine.name, " ", mark("state slow", "slow")) : machine.name,
    bytes(machine.sent),
    `${bytes(machine.sent_per_second)}/s`,
    bytes(machine.received),
    `${bytes(machine.received_per_second)}/s`,
    milliseconds(machine.typical),
    milliseconds(machine.late),
    `${whole(machine.hedged_requests)} of ${whole(machine.requests)}`,
  ]);
  return part("Between this machine and the others", table(columns, rows));
}

function dividedCaches(cluster) {
  if (!cluster.caches.length) return null;
  const columns = [["cache", ""], ["machines", "number"], ["samples", "number"], ["holds", "number"], ["hedged", "number"], ["samples of batches were found", "wide"]];
  const rows = cluster.caches.map((cache) => [
    cache.content.slice(0, 12),
    whole(cache.machines),
    whole(cache.samples),
    `${bytes(cache.used_bytes)} of ${bytes(cache.budget)}`,
    whole(cache.hedged),
    foundBar(cache.here, cache.elsewhere, cache.storage),
  ]);
  return part("Divided caches, on all machines", table(columns, rows));
}

function clusterCard(cluster, traffic, now) {
  const present = cluster.machines.filter((machine) => machine.state !== "gone");
  const sum = (name) => present.reduce((total, machine) => total + (machine[name] ?? 0), 0);
  const found = sum("local") + sum("remote") + sum("storage");
  const share = (name) => (found ? percent(sum(name) / found) : "-");
  const figures = [
    figure("", whole(present.length), present.length === 1 ? "machine" : "machines"),
    figure("", `${sum("idle_cores").toFixed(1)} of ${whole(sum("cores"))}`, "cores idle"),
    figure("", `${bytes(sum("used_bytes"))}`, `cached, room for ${bytes(sum("cache_bytes"))}`),
    figure("rate", share("remote"), "of samples came from other machines"),
    figure("stall", share("storage"), "came from storage"),
    figure("rate", `${bytes(sum("received_per_second"))}/s`, `received here, ${bytes(sum("sent_per_second"))}/s sent`),
  ];
  const points = (at) => traffic.map((point) => [point[0], point[at]]);
  return make(
    "article",
    { class: "card" },
    make("h2", {}, "Cluster"),
    make("p", { class: "soft" }, `seen from ${cluster.machine} at ${cluster.address}, view ${cluster.view}`),
    make("div", { class: "figures" }, ...figures),
    make(
      "div",
      { class: "charts" },
      part("Received here, bytes per second", chart("rate", "bytes received per second", points(1), now, null, compact)),
      part("Sent from here, bytes per second", chart("rate", "bytes sent per second", points(2), now, null, compact)),
    ),
    machineTable(cluster),
    trafficTable(cluster),
    dividedCaches(cluster),
  );
}

function draw(view) {
  const count = view.loaders.length;
  const state = document.getElementById("state");
  state.className = "";
  state.textContent = count
    ? `${count} ${count === 1 ? "loader" : "loaders"}, ${new Date(1e3 * view.time).toLocaleTimeString()}`
    : "No loader is running. A loader appears here when it delivers its first batch.";
  const cards = view.loaders.map((loader) => card(loader, view.time));
  document.getElementById("loaders").replaceChildren(...cards);
  document.getElementById("node").replaceChildren(...(view.node?.groups ? [nodeCard(view.node)] : []));
  const cluster = view.cluster ? [clusterCard(view.cluster, view.traffic, view.time)] : [];
  document.getElementById("cluster").replaceChildren(...cluster);
}

async function look() {
  try {
    const response = await fetch("snapshot.json");
    draw(await response.json());
  } catch (error) {
    const state = document.getElementById("state");
    state.className = "lost";
    state.textContent = `No answer: has penstock watch ended? The figures below are out of date. (${error.message})`;
  }
  setTimeout(look, EVERY);
}

look();
