// SPDX-License-Identifier: Apache-2.0
// Keeps a page up to date: the server sends parts of the page as HTML, and charts as tables, when they change.
"use strict";

const plots = new Map();
const COLOURS = 8;
let source = null;

function say(text) {
  const place = document.getElementById("connection");
  if (place.textContent !== text) place.textContent = text;
}

// What has the focus keeps it, and what is unfolded stays so, by their ids; a log that is read at its end stays there.
function replace(place, html) {
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  const scroller = place.closest(".log");
  const atEnd = scroller && scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 4;
  const unfolded = [...place.querySelectorAll("details[open] > summary[id]")].map((each) => each.id);
  place.innerHTML = html;
  for (const id of unfolded) document.getElementById(id)?.parentElement.setAttribute("open", "");
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
}

function shown(value, unit) {
  if (value == null) return "-";
  if (unit === "share") return `${(100 * value).toFixed(0)} %`;
  if (!unit.startsWith("bytes")) return String(Number(value.toPrecision(4)));
  const exponent = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${Number((value / 1000 ** exponent).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB"][exponent]}${unit.slice(5)}`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(place, chart) {
  const line = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--text"), grid: line, ticks: line };
  const value = (_plot, found) => shown(found, chart.unit);
  const series = chart.names.map((label, number) => ({
    label, value, spanGaps: true, width: 1.5, stroke: colour(`--curve-${number % COLOURS}`),
    dash: [[], [8, 4], [2, 3], [10, 3, 2, 3]][Math.floor(number / COLOURS) % 4],
  }));
  const across = chart.time ? {} : { value: (_plot, found) => shown(found, "") };
  return {
    width: place.clientWidth, height: 240, legend: { show: chart.names.length <= 12 },
    scales: { x: { time: chart.time } },
    axes: [axis, { ...axis, size: 70, values: (_plot, found) => found.map((each) => shown(each, chart.unit)) }],
    series: [{ label: chart.time ? "time" : chart.across, ...across }, ...series],
  };
}

// A screen reader has the last value of each curve; a browser without a mouse, too.
function described(chart, data) {
  const value = (number) => shown(data[number + 1].findLast((each) => each != null), chart.unit);
  const last = chart.names.map((name, number) => `${name} ${value(number)}`);
  return last.slice(0, 12).join(", ") || "no values yet";
}

function draw(place, chart) {
  const data = chart.tables.length > 1 ? uPlot.join(chart.tables) : chart.tables[0];
  place.setAttribute("aria-label", `${place.previousElementSibling.textContent}: ${described(chart, data)}`);
  if (!data) return;
  const kind = JSON.stringify([chart.names, chart.unit, chart.across]);
  const known = plots.get(place.id);
  if (known && known.kind === kind) {
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  plots.set(place.id, { kind, plot: new uPlot(options(place, chart), data, place) });
}

function take(event) {
  for (const [id, told] of Object.entries(JSON.parse(event.data))) {
    const place = document.getElementById(id);
    if (!place) continue;
    if (typeof told === "string") replace(place, told);
    else draw(place, told);
  }
}

function connect() {
  source?.close();
  source = new EventSource(document.body.dataset.live);
  source.onmessage = take;
  source.onopen = () => say("");
  source.onerror = () =>
    say(source.readyState === EventSource.CLOSED
      ? "This page is no longer live: open the URL that the dashboard has printed last."
      : "The dashboard does not answer; the page shows what was.");
}

// A browser has few connections to a server: a page that nobody sees gives its own back.
document.addEventListener("visibilitychange", () => (document.hidden ? source?.close() : connect()));
window.addEventListener("pagehide", () => source?.close());
window.addEventListener("pageshow", (event) => event.persisted && connect());
window.addEventListener("resize", () => {
  for (const [id, { plot }] of plots) plot.setSize({ width: document.getElementById(id).clientWidth, height: 240 });
});
// What the page has come with is painted first: the timer begins with a frame, and ends behind it.
if (!document.hidden) requestAnimationFrame(() => setTimeout(connect));
