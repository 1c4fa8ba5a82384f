/* The network of a guest: an address for it, and the end of the connections
 * that a saved memory would otherwise have in every copy. */
#define _GNU_SOURCE
#include "guest.h"
#include "guest_body.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

struct question {
	struct nlmsghdr head;
	struct inet_diag_req_v2 body;
};

static void put_inet(struct sockaddr *into, uint32_t address)
{
	struct sockaddr_in inet = {.sin_family = AF_INET, .sin_addr.s_addr = address};
	memcpy(into, &inet, sizeof inet);
}

static int bring_up(int sock, const char *name, const struct address *address)
{
	struct ifreq ask = {0};
	if (strlen(name) >= sizeof ask.ifr_name)
		return EINVAL;
	strcpy(ask.ifr_name, name);
	if (address) {
		put_inet(&ask.ifr_addr, address->own);
		if (ioctl(sock, SIOCSIFADDR, &ask) < 0)
			return errno;
		put_inet(&ask.ifr_netmask, address->mask);
		if (ioctl(sock, SIOCSIFNETMASK, &ask) < 0)
			return errno;
	}
	if (ioctl(sock, SIOCGIFFLAGS, &ask) < 0)
		return errno;
	ask.ifr_flags |= IFF_UP;
	return ioctl(sock, SIOCSIFFLAGS, &ask) < 0 ? errno : 0;
}

/* INTERFACE\tADDRESS/PREFIX\tGATEWAY */
int guest_address(char *value)
{
	char *field[3];
	struct address address;
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
	if (!body_fields(value, field, 3) || !body_address(field[1], field[2], &address))
		return EINVAL;
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return errno;
	int error = bring_up(sock, "lo", NULL);
	if (!error)
		error = bring_up(sock, field[0], &address);
	put_inet(&route.rt_dst, 0);
	put_inet(&route.rt_genmask, 0);
	put_inet(&route.rt_gateway, address.gateway);
	if (!error && ioctl(sock, SIOCADDRT, &route) < 0)
		error = errno;
	close(sock);
	return error;
}

static bool is_loopback(const uint32_t *address, uint8_t family)
{
	static const struct in6_addr one = IN6ADDR_LOOPBACK_INIT;
	struct in6_addr six;
	if (family == AF_INET)
		return ntohl(address[0]) >> 24 == 127;
	memcpy(&six, address, sizeof six);
	return memcmp(&six, &one, sizeof six) == 0 || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}

static bool leads_outside(const struct inet_diag_msg *found)
{
	size_t size = found->idiag_family == AF_INET ? 4 : 16;
	return found->id.idiag_dport != 0 && !is_loopback(found->id.idiag_dst, found->idiag_family) &&
	       memcmp(found->id.idiag_src, found->id.idiag_dst, size) != 0;
}

static int put_question(int sock, uint16_t type, uint16_t flags, const struct inet_diag_req_v2 *body)
{
	struct question question = {
		.head = {.nlmsg_len = sizeof question, .nlmsg_type = type, .nlmsg_flags = NLM_F_REQUEST | flags},
		.body = *body,
	};
	return send(sock, &question, sizeof question, 0) < 0 ? errno : 0;
}

/* One end; a socket that ended by itself meanwhile is none. */
static int destroy(int sock, uint8_t protocol, const struct inet_diag_msg *found, uint32_t *closed)
{
	struct inet_diag_req_v2 ask = {.sdiag_family = found->idiag_family, .sdiag_protocol = protocol,
				       .idiag_states = ~0U, .id = found->id};
	struct {
		struct nlmsghdr head;
		struct nlmsgerr body;
	} answer;
	int error = put_question(sock, SOCK_DESTROY, NLM_F_ACK, &ask);
	if (error)
		return error;
	ssize_t got = recv(sock, &answer, sizeof answer, 0);
	if (got < (ssize_t)sizeof answer || answer.head.nlmsg_type != NLMSG_ERROR)
		return got < 0 ? errno : EPROTO;
	*closed += answer.body.error == 0;
	return answer.body.error == -ENOENT ? 0 : -answer.body.error;
}

/* What ends a list begins with minus an errno, or 0. */
static int how_it_ended(const struct nlmsghdr *last)
{
	int error = -EPROTO;
	if (last->nlmsg_len >= NLMSG_LENGTH(sizeof error))
		memcpy(&error, NLMSG_DATA(last), sizeof error);
	if (error == -ENOENT) /* the kernel lacks a module for it */
		error = -EPROTONOSUPPORT;
	return error ? error : 1;
}

/* 1 once all are told, 0 if there are more, or minus an errno. */
static int hear_listed(int list, int end, uint8_t protocol, uint32_t *closed)
{
	static _Alignas(8) uint8_t block[32 * 1024];
	ssize_t got = recv(list, block, sizeof block, 0);
	if (got < 0)
		return -errno;
	int left = (int)got; /* below 0 where a last message is not padded */
	for (struct nlmsghdr *at = (void *)block; NLMSG_OK(at, left); at = NLMSG_NEXT(at, left)) {
		const struct inet_diag_msg *found = NLMSG_DATA(at);
		if (at->nlmsg_type == NLMSG_DONE || at->nlmsg_type == NLMSG_ERROR)
			return how_it_ended(at);
		if (at->nlmsg_len < NLMSG_LENGTH(sizeof *found) || !leads_outside(found))
			continue;
		int error = destroy(end, protocol, found, closed);
		if (error)
			return -error;
	}
	return 0;
}

static int close_all(int list, int end, uint8_t family, uint8_t protocol, uint32_t *closed)
{
	/* What waits for the end of a connection belongs to no program. */
	struct inet_diag_req_v2 ask = {.sdiag_family = family, .sdiag_protocol = protocol,
				       .idiag_states = ~(1U << TCP_LISTEN | 1U << TCP_TIME_WAIT)};
	int told = 0, error = put_question(list, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &ask);
	while (!error && !told) {
		told = hear_listed(list, end, protocol, closed);
		error = told < 0 ? -told : 0;
	}
	return error;
}

int guest_close_outside(uint32_t *closed)
{
	static const uint8_t families[] = {AF_INET, AF_INET6}, protocols[] = {IPPROTO_TCP, IPPROTO_UDP};
	int error = guest_enter(CLONE_NEWNET);
	if (error)
		return error;
	int list = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
	int end = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
	if (list < 0 || end < 0)
		error = errno;
	guest_leave(CLONE_NEWNET);
	for (size_t i = 0; i < 4 && !error; i++)
		error = close_all(list, end, families[i / 2], protocols[i % 2], closed);
	if (list >= 0)
		close(list);
	if (end >= 0)
		close(end);
	return error;
}
