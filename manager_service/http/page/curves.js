// Curves over the steps of one or several jobs, drawn by uPlot; each says in words what it shows.

import {h, say} from "./dom.js";
import {number} from "./format.js";

const HEIGHT = 150;
const together = "marlaas";

/** uPlot, which the page loads next to itself: a script made here would need an exception from the page's own rules. */
export function load() {
  if (window.uPlot) return Promise.resolve(window.uPlot);
  const script = document.getElementById("uplot");
  return new Promise((resolve, reject) => {
    script.addEventListener("load", () => resolve(window.uPlot));
    script.addEventListener("error", () => reject(new Error("uplot.min.js is missing")));
  });
}

const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (i) => shade(`--line-${i % 8}`);

/**
 * A figure that holds one chart. draw(xs, series) shows series [{label, values, colour, dots, errors}], all over the same xs;
 * `errors`: half of an interval for each value.
 */
export class Chart {
  constructor(uPlot, title, {axis = "step", time = false, note = ""} = {}) {
    this.uPlot = uPlot;
    this.title = title;
    this.axis = axis;
    this.now = h("span", {class: "now"});
    this.box = h("div", {class: "plot", role: "img"});
    this.node = h("figure", {class: "chart"}, h("figcaption", {title: note || null}, h("b", {}, title), this.now), this.box);
    this.plot = null;
    this.shape = "";
    this.series = [];
    this.resize = new ResizeObserver(() => this.plot?.setSize({width: this.box.clientWidth, height: HEIGHT}));
    this.resize.observe(this.box);
  }

  draw(xs, series) {
    this.series = series;
    const shape = JSON.stringify([series.map((one) => [one.label, one.colour, Boolean(one.dots)])]);
    const data = [xs, ...series.map((one) => one.values)];
    if (this.plot && shape === this.shape) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.plot = new this.uPlot(this.options(series), data, this.box);
      this.shape = shape;
    }
    this.box.setAttribute("aria-label", `${this.title}. ${series.map((one) => inWords(xs, one, this.axis)).join(" ")}`);
    this.tell(null);
  }

  options(series) {
    const axis = {stroke: () => shade("--muted"), grid: {stroke: () => shade("--rule"), width: 1}, ticks: {show: false}, font: "11px system-ui", gap: 4};
    return {
      width: this.box.clientWidth || 320, height: HEIGHT, padding: [8, 8, 0, 0],
      legend: {show: false}, scales: {x: {time: false}, y: {range: (_, low, high) => around(...this.reach(low, high))}},
      cursor: {sync: {key: together}, y: false, points: {size: 5}, drag: {x: true, y: false}},
      axes: [{...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000]}, {...axis, size: 46, values: (_, splits) => splits.map((value) => value === null ? "" : number(value, 6))}],
      series: [{}, ...series.map((one) => ({
        label: one.label, stroke: one.colour, width: one.dots ? 0 : 1.5, spanGaps: true,
        points: {show: Boolean(one.dots), size: 5, fill: one.colour, stroke: one.colour}, paths: one.dots ? () => null : undefined,
      }))],
      hooks: {setCursor: [(plot) => this.tell(plot.cursor.idx)], draw: [(plot) => this.intervals(plot)]},
    };
  }

  /** Says the values under the cursor; the newest without one. */
  tell(at) {
    const parts = this.series.map((one) => {
      const i = at ?? one.values.findLastIndex((value) => value !== null && value !== undefined);
      const value = one.values[i];
      if (value === null || value === undefined) return "";
      const interval = one.errors?.[i] ? ` ± ${number(one.errors[i], 2)}` : "";
      return `${this.series.length > 1 ? `${one.label} ` : ""}${number(value)}${interval}`;
    });
    say(this.now, parts.filter(Boolean).join(" · "));
  }

  /** From the lowest to the highest value, with their intervals. */
  reach(low, high) {
    const ends = this.series.flatMap((one) => (one.errors ?? []).flatMap((error, i) => error && one.values[i] !== null ? [one.values[i] - error, one.values[i] + error] : []));
    return low === null ? [null, null] : [Math.min(low, ...ends), Math.max(high, ...ends)];
  }

  intervals(plot) {
    this.series.forEach((one, s) => {
      if (!one.errors) return;
      const context = plot.ctx;
      context.save();
      context.strokeStyle = one.colour;
      context.lineWidth = devicePixelRatio;
      plot.data[0].forEach((x, i) => {
        const value = plot.data[s + 1][i];
        if (value === null || value === undefined || !one.errors[i]) return;
        const at = Math.round(plot.valToPos(x, "x", true));
        context.beginPath();
        context.moveTo(at, plot.valToPos(value - one.errors[i], "y", true));
        context.lineTo(at, plot.valToPos(value + one.errors[i], "y", true));
        context.stroke();
      });
      context.restore();
    });
  }

  end() {
    this.resize.disconnect();
    this.plot?.destroy();
  }
}

const ROUNDING = 1e-6;

/** The range of an axis: a little more than the values', and something for one value too. */
function around(low, high) {
  if (low === null) return [0, 1];
  if (high - low <= ROUNDING * Math.max(Math.abs(low), Math.abs(high))) low = high; // what differs is the arithmetic's
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const margin = 0.06 * (high - low);
  return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
}

function inWords(xs, one, axis) {
  const known = one.values.map((value, i) => [xs[i], value]).filter(([, value]) => value !== null && value !== undefined);
  if (!known.length) return `${one.label}: nothing yet.`;
  const values = known.map(([, value]) => value);
  const [first, last] = [known[0], known.at(-1)];
  return `${one.label}: ${number(first[1])} at ${axis} ${first[0]}, ${number(last[1])} at ${axis} ${last[0]}, between ${number(Math.min(...values))} and ${number(Math.max(...values))}.`;
}
