// Draws a value over the last minutes as an SVG chart.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 520, HEIGHT = 150;
const LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 22;
const MINUTES = 5;

// Points further apart than this many seconds are not joined, because there is no data between them.
const GAP = 12;

function make(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// The smallest of 1, 2, 5, 10, 20, 50 ... that is at least the value.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

// points: [[seconds, value], ...]; now: seconds; axisMax: top of the axis, null to fit the points;
// format: turns a value into the text of an axis label.
export function chart(kind, label, points, now, axisMax, format) {
  const svg = make("svg", {
    class: `chart ${kind}`,
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    "aria-label": label,
  });
  const top = axisMax ?? roundUp(Math.max(0, ...points.map(([, value]) => value)));
  const x = (time) => LEFT + (WIDTH - LEFT - RIGHT) * (1 - (now - time) / (MINUTES * 60));
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top));
  for (const part of [0, 0.5, 1]) {
    const at = y(part * top);
    svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    svg.append(make("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, format(part * top)));
  }
  for (let minute = 0; minute <= MINUTES; minute += 1) {
    const text = minute === 0 ? "now" : `-${minute} min`;
    const anchor = minute === 0 ? "end" : minute === MINUTES ? "start" : "middle";
    svg.append(
      make("text", { x: x(now - 60 * minute), y: HEIGHT - 6, "text-anchor": anchor }, text),
    );
  }
  for (const run of joinedRuns(points)) {
    const line = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    const first = x(run[0][0]).toFixed(1), last = x(run.at(-1)[0]).toFixed(1);
    svg.append(
      make("polygon", {
        class: "area",
        points: [`${first},${y(0)}`, ...line, `${last},${y(0)}`].join(" "),
      }),
    );
    svg.append(make("polyline", { class: "line", points: line.join(" ") }));
  }
  if (points.length) {
    const [time, value] = points.at(-1);
    svg.append(make("circle", { class: "dot", cx: x(time), cy: y(value), r: 3 }));
  }
  return svg;
}

// Cuts the points into runs without gaps.
function joinedRuns(points) {
  const runs = [];
  let before = -Infinity;
  for (const point of points) {
    if (point[0] - before > GAP) runs.push([]);
    runs.at(-1).push(point);
    before = point[0];
  }
  return runs;
}
