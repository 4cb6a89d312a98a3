// Unpacks the blocks of data that the page holds: gzip in base64.

const report = { head: null, runs: [], two: false };

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function unpack(name) {
  const node = document.getElementById(`block-${name}`);
  const packed = new Blob([bytesOf(node.textContent)]).stream();
  node.textContent = ''; // the memory is needed once
  return new Response(packed.pipeThrough(new DecompressionStream('gzip'))).json();
}

// Reads the completions of a run once; the page is already there.
function completionsOf(number) {
  const run = report.runs[number];
  run.loading ??= unpack(`completions-${number}`);
  return run.loading;
}

// Returns the values of a metric of a run, or null.
function column(run, name) {
  const values = run.curves.columns[name];
  return values && values.some((v) => v !== null) ? values : null;
}

// Returns the evaluations of a run: [{step, value, low, high}], the one before training at step 0.
function evaluations(run, measure = run.measure) {
  const found = [];
  const before = run.before;
  if (before && before[measure] !== undefined && before[measure] !== null) {
    const [low, high] = (measure === 'accuracy' && before.interval_95) || [null, null];
    found.push({ step: 0, value: Number(before[measure].toPrecision(5)), low, high });  // as `curves`
  }
  const values = run.curves.columns[`eval/${measure}`] || [];
  const lows = run.curves.columns[`eval/${measure}_low`] || [];
  const highs = run.curves.columns[`eval/${measure}_high`] || [];
  values.forEach((value, i) => {
    if (value === null) return;
    found.push({
      step: run.curves.steps[i], value, low: lows[i] ?? null, high: highs[i] ?? null,
    });
  });
  return found;
}

function mean(values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function sum(values) {
  return values.reduce((a, b) => a + (b ?? 0), 0);
}

// Returns the means of the first and the last tenth of a metric.
function tenths(run, name) {
  const values = column(run, name);
  if (!values) return null;
  const tenth = Math.max(1, Math.floor(values.length / 10));
  return { first: mean(values.slice(0, tenth)), last: mean(values.slice(-tenth)) };
}
