// Draws curves with uPlot; all of them share the position of the cursor.

const HEIGHT = 190;
const EXACT = /^(learning_rate|num_tokens|epoch|beta$)/; // set or counted, not measured
const live = new Set(); // the drawn charts, to be redrawn in other colours

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function withAlpha(hex, alpha) {
  const byte = Math.round(255 * alpha).toString(16).padStart(2, '0');
  return /^#[0-9a-f]{6}$/i.test(hex) ? hex + byte : hex;
}

// Bias-corrected exponential moving average.
function smoothed(values, weight) {
  let total = 0;
  let norm = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return null;
    total = weight * total + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return Number((total / norm).toPrecision(7)); // keeps a constant constant
  });
}

// Puts the series of several runs on one axis of steps.
function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((s, i) => [s, i]));
  const spread = (x, values) => {
    const out = new Array(steps.length).fill(null);
    x.forEach((s, i) => { out[place.get(s)] = values[i] ?? null; });
    return out;
  };
  return { steps, spread };
}

// Draws vertical lines at the steps of alarms.
function alarmLines(alarms) {
  return (u) => {
    const { ctx } = u;
    const { top, height } = u.bbox;
    for (const alarm of alarms) {
      const x = Math.round(u.valToPos(alarm.step, 'x', true));
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      const ink = colour(alarm.kind === 'stop' ? 'bad' : 'warn');
      const size = 5 * devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = withAlpha(ink, 0.75);
      ctx.fillStyle = ink;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - size, top);
      ctx.lineTo(x + size, top);
      ctx.lineTo(x, top + 1.5 * size);
      ctx.fill();
      ctx.restore();
    }
  };
}

// A chart in a card. A line is {label, x, values, ink, low, high, points, dash}.
function chart(spec) {
  const readout = h('div', { class: 'readout', 'aria-hidden': 'true' });
  const host = h('div', { class: 'plot', style: { minHeight: `${spec.height || HEIGHT}px` } });
  const box = h('figure', { class: `chart${spec.wide ? ' wide' : ''}`, 'data-metric': spec.title },
    h('figcaption', {}, h('span', { class: 'chart-title', title: spec.hint || spec.title }, spec.title), readout),
    host, spec.legend ? legend(spec.lines) : null);
  const state = { spec, host, readout, plot: null, watcher: null };
  state.watcher = new ResizeObserver(() => fit(state));
  state.watcher.observe(host);
  host.setAttribute('role', 'img');
  host.setAttribute('aria-label', spec.title);
  live.add(state);
  return box;
}

// Draws a chart in its element's width, unless it is hidden.
function fit(state) {
  const width = Math.floor(state.host.clientWidth);
  if (!width) return;
  if (!state.plot) draw(state, width);
  else if (Math.abs(state.plot.width - width) > 1) state.plot.setSize({ width, height: state.spec.height || HEIGHT });
}

function legend(lines) {
  return h('ul', { class: 'legend' }, lines.map((line) => h('li', {},
    h('i', { style: { background: `var(--${line.ink})` } }), line.label)));
}

function draw(state, width) {
  const { spec, host, readout } = state;
  const lines = spec.lines.filter((line) => line.values.length);
  const { steps, spread } = aligned(lines.length ? lines : [{ x: [0], values: [null] }]);
  const data = [steps];
  const series = [{}];
  const bands = [];
  const shown = []; // [series, line] that the readout names
  const format = spec.format || number;
  for (const line of lines) {
    const ink = colour(line.ink);
    const values = spread(line.x, line.values);
    if (line.low && line.high) {
      const at = data.length;
      data.push(spread(line.x, line.low), spread(line.x, line.high));
      series.push({ stroke: null, width: 0, points: { show: false } }, { stroke: null, width: 0, points: { show: false } });
      for (const one of series.slice(-2)) one.spanGaps = true;
      bands.push({ series: [at + 1, at], fill: withAlpha(ink, 0.16) });
    }
    const known = values.filter((v) => v !== null).length;
    const weight = line.points ? 0 : spec.smoothing ?? 0;
    const isSmoothed = weight > 0 && known > 60 && !EXACT.test(line.name || '');
    if (isSmoothed) {
      series.push({ stroke: withAlpha(ink, 0.25), width: 1, spanGaps: true, points: { show: false } });
      data.push(values);
      shown.push([data.length - 1, line]);
    }
    series.push({
      stroke: ink, width: isSmoothed ? 2 : 1.6, spanGaps: true, dash: line.dash || [],
      points: { show: known < (line.points ? 80 : 40), size: line.points ? 7 : 4, fill: ink, stroke: ink },
    });
    data.push(isSmoothed ? smoothed(values, weight) : values);
    if (!isSmoothed) shown.push([data.length - 1, line]);
  }
  const axis = { stroke: colour('ink-2'), grid: { stroke: colour('line'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  const height = spec.height || HEIGHT;
  const say = (u) => {
    const { idx } = u.cursor;
    readout.replaceChildren();
    if (idx === null || idx === undefined) return;
    const parts = [];
    for (const [at, line] of shown) {
      const value = u.data[at][idx];
      if (value === null || value === undefined) continue;
      parts.push(h('span', {}, h('i', { style: { background: `var(--${line.ink})` } }), `${shown.length > 1 ? `${line.label} ` : ''}${format(value)}`));
    }
    const near = (spec.alarms || []).filter((a) => Math.abs(u.valToPos(a.step, 'x') - u.cursor.left) < 6);
    readout.append(h('b', {}, `step ${steps[idx]}`), ...parts, ...near.slice(0, 1).map((a) => h('em', {}, a.name)));
  };
  state.plot = new uPlot({
    width, height, padding: [10, 20, 0, 0],
    cursor: { sync: { key: 'steps', scales: ['x', null] }, drag: { x: true, y: false }, points: { size: 6 }, y: false },
    legend: { show: false },
    scales: {
      x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { range: spec.range },
    },
    axes: [
      { ...axis, space: 60, size: 26, values: (u, at) => at.map((v) => (Number.isInteger(v) ? whole.format(v) : '')) },
      { ...axis, size: 52, space: 34, values: (u, at) => at.map((v) => (v === null ? '' : (spec.axis || format)(v))) },
    ],
    series, bands,
    hooks: {
      setCursor: [say],
      draw: [alarmLines(spec.alarms || [])],
    },
  }, data, host);
}

// Redraws all charts, in the colours of another theme or with other settings.
function redrawAll(change = {}) {
  for (const state of live) {
    if (!state.host.isConnected) { forget(state); continue; }
    Object.assign(state.spec, change);
    if (!state.plot) continue;
    const { width } = state.plot;
    state.plot.destroy();
    state.plot = null;
    draw(state, width);
  }
}

function forget(state) {
  state.watcher.disconnect();
  if (state.plot) state.plot.destroy();
  live.delete(state);
}

// The lines of a metric, one for each run.
function linesOf(name) {
  return report.runs.flatMap((run, i) => {
    const values = column(run, name);
    if (!values) return [];
    return [{
      label: report.two ? run.label : name, name, x: run.curves.steps, values, ink: `run-${i}`,
      low: column(run, `${name}_low`), high: column(run, `${name}_high`),
      points: name.startsWith('eval/'),
    }];
  });
}

function alarmsOf() {
  return report.runs.flatMap((run) => run.alarms || []);
}

function metricChart(name, title = name, extra = {}) {
  const lines = linesOf(name);
  if (!lines.length) return null;
  return chart({ title, hint: name, lines, alarms: alarmsOf(), smoothing: settings.smoothing, ...extra });
}

function heldOutChart(extra = {}) {
  const lines = report.runs.flatMap((run, i) => {
    const found = evaluations(run);
    if (!found.length) return [];
    const hasBand = found.some((e) => e.low !== null);
    return [{
      label: report.two ? run.label : run.measure, x: found.map((e) => e.step), values: found.map((e) => e.value),
      low: hasBand ? found.map((e) => e.low) : null, high: hasBand ? found.map((e) => e.high) : null,
      ink: `run-${i}`, points: true,
    }];
  });
  if (!lines.length) return null;
  const { measure } = report.runs[0];
  return chart({ title: `held-out ${measure}`, hint: `eval/${measure}, with its 95 % interval; step 0 is before training`, lines, alarms: alarmsOf(), ...extra });
}

const settings = { smoothing: 0.8 };
