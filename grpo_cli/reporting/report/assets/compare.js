// The tab that compares two runs: results side by side, and evaluations of the same problems.

function compareTab() {
  const [a, b] = report.runs;
  return h('div', { class: 'stack' }, sideBySide(a, b), pairedCard(), h('div', { class: 'charts two' }, metricChart('reward', 'training reward'), heldOutChart()), recipeDifference());
}

function sideBySide(a, b) {
  const last = (run) => evaluations(run).filter((e) => e.step > 0).pop();
  const first = (run) => evaluations(run).find((e) => e.step === 0);
  const evaluation = (e, run) => {
    if (!e) return 'not recorded';
    const format = run.measure === 'accuracy' ? (v) => share(v) : number;
    return h('span', {}, format(e.value), e.low === null ? null : h('small', { class: 'range' }, `${format(e.low)} – ${format(e.high)}`));
  };
  const rows = [
    [`held-out ${a.measure}, before`, evaluation(first(a), a), evaluation(first(b), b)],
    [`held-out ${a.measure}, last`, evaluation(last(a), a), evaluation(last(b), b)],
    ['training reward, last tenth', ...[a, b].map((run) => number(tenths(run, 'reward')?.last))],
    ['steps', ...[a, b].map((run) => whole.format(run.curves.steps[run.curves.steps.length - 1] || 0))],
    ['time', ...[a, b].map((run) => (run.summary ? seconds(run.summary.seconds) : 'not recorded'))],
  ];
  return card('Side by side', grid([{ title: '' }, { title: a.label, number: true }, { title: b.label, number: true }], rows, 'Results of both runs'));
}

function pairedCard() {
  const found = report.head.compared || {};
  const title = 'The same held-out problems';
  if (!found.paired) return card(title, missing(found.why || 'No paired evaluation.'));
  const rows = Object.entries(found.paired.benchmarks).flatMap(([name, modes]) => Object.entries(modes).map(([mode, n]) => [
    mode && mode !== 'null' ? `${name} (${mode})` : name, n.n, share(n.accuracy_first), share(n.accuracy_second),
    h('span', { class: n.difference >= 0 ? 'good' : 'bad' }, plus(100 * n.difference, (v) => number(v, 3))),
    `${plus(100 * n.interval_95[0], (v) => number(v, 3))} to ${plus(100 * n.interval_95[1], (v) => number(v, 3))}`,
    number(n.p_value, 2), `+${n.flipped_to_right.length} −${n.flipped_to_wrong.length}`,
  ]));
  const [a, b] = report.runs;
  return card({ title, note: 'Paired by problem: the difference in points, with its 95 % interval; p by McNemar or random signs; problems that flipped to right and to wrong.' },
    grid([{ title: 'benchmark' }, ...['problems', a.label, b.label, 'difference', '95 % interval', 'p', 'flipped'].map((t) => ({ title: t, number: true }))], rows, title),
    (found.paired.notes || []).map((n) => h('p', { class: 'note' }, n)),
    h('p', { class: 'note' }, `${found.paired.first} and ${found.paired.second}`));
}
