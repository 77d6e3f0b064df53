// A curve as small as a word.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [96, 22];

/** Draws values over their own range, which is at least 0 to 1 for those within it. `what`: they are, for screen readers. */
export function spark(node, values, last, what = "reward") {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return node.replaceChildren();
  const low = Math.min(0, ...known), high = Math.max(1, ...known);
  const x = (i) => values.length < 2 ? WIDTH : 1 + i * (WIDTH - 3) / (values.length - 1);
  const y = (value) => HEIGHT - 2 - (value - low) / (high - low) * (HEIGHT - 4);
  const points = values.map((value, i) => value === null || value === undefined ? null : `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"})) svg.setAttribute(name, value);
  svg.setAttribute("aria-label", `${what} from ${known[0].toFixed(2)} to ${(last ?? known.at(-1)).toFixed(2)}`);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.filter(Boolean).join(" "));
  svg.append(line);
  node.replaceChildren(svg);
}
